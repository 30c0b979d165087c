"""`logs`: print or follow the log of one part of a running service, on whatever machine it is."""

import sys

from skyrl_actors.commands.controllers import num_shards
from skyrl_actors.commands.serve import join
from skyrl_actors.messages.errors import ConfigError, NotFound, Unavailable
from skyrl_actors.part_logs import PartLogs


def show(part: str, follow: bool, lines: int, printed: bool, service: str) -> None:
    """Print the newest lines of a part's log. Raises ConfigError for an unknown part."""
    join(service)
    plain = not sys.stdout.isatty()
    try:
        for text in PartLogs(service, num_shards(service)).read(
            part, lines, follow=follow, printed=printed, plain=plain
        ):
            sys.stdout.write(text)
            sys.stdout.flush()
    except (NotFound, Unavailable) as error:
        raise ConfigError(f"{service}: {error}") from None
