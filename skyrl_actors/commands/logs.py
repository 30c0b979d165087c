"""`logs`: print or follow the log of one part of a running service, on whatever machine it is."""

import sys

from ray.util.state import get_log
from ray.util.state.exception import RayStateApiException

from skyrl_actors import remote
from skyrl_actors.commands.serve import join
from skyrl_actors.messages.errors import ConfigError


def show(part: str, follow: bool, lines: int, printed: bool, service: str) -> None:
    """Print the newest lines of a part's log. Raises ConfigError for an unknown part."""
    join(service)
    actor = remote.named(f"{service}:{part}")
    if actor is None:
        prefix = f"{service}:"
        names = (name.removeprefix(prefix) for name in remote.names_with(prefix))
        known = ", ".join(sorted(name for name in names if not name.startswith("standby")))
        raise ConfigError(f"the service {service!r} has no part {part[:80]!r}; it has {known}")
    try:
        for text in get_log(
            actor_id=actor._actor_id.hex(),  # pyright: ignore[reportPrivateUsage]
            follow=follow,
            tail=lines,
            suffix="out" if printed else "err",
            errors="replace",
            filter_ansi_code=not sys.stdout.isatty(),
        ):
            sys.stdout.write(text)
            sys.stdout.flush()
    except RayStateApiException as error:
        raise ConfigError(
            f"Ray's dashboard, which reads logs on all machines, does not answer: {error}"
        ) from None
