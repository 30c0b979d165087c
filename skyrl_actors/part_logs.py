"""Read the logs of a service's parts, on whatever machine they are, through Ray's dashboard."""

from collections.abc import Iterator

from ray.util.state import get_log
from ray.util.state.exception import RayStateApiException

from skyrl_actors import remote
from skyrl_actors.messages.errors import NotFound, Unavailable

HIDDEN = "standby"  # processes without a part of their own


class PartLogs:
    """The logs of one service. A part is a name such as `controller` or `engine:0`.

    Parts of its second shard are `2.controller`, `2.engine:0` and so on.
    """

    def __init__(self, service: str, num_shards: int = 1):
        self._service = service
        self._num_shards = num_shards

    def parts(self) -> list[str]:
        """Return the names of the living parts."""
        found: list[str] = []
        for number in range(1, self._num_shards + 1):
            prefix, shown = self._prefixes(number)
            names = sorted(name.removeprefix(prefix) for name in remote.names_with(prefix))
            found += [f"{shown}{name}" for name in names if not name.startswith(HIDDEN)]
        return found

    def _prefixes(self, number: int) -> tuple[str, str]:
        """Return what the names of a shard's actors begin with, and the names of its parts."""
        if number == 1:
            return f"{self._service}:", ""
        return f"{self._service}.{number}:", f"{number}."

    def _actor_name(self, part: str) -> str:
        number, dot, name = part.partition(".")
        if not dot or not number.isdecimal():
            return f"{self._service}:{part}"
        return f"{self._prefixes(int(number))[0]}{name}"

    def read(
        self, part: str, lines: int, *, follow: bool = False, printed: bool = False, plain: bool
    ) -> Iterator[str]:
        """Yield the newest lines of a part's log, and with `follow` also the next ones.

        `printed`: standard output instead of the log. `plain`: without colours.

        Raises NotFound for an unknown part, and Unavailable when the dashboard does not answer.
        """
        actor = remote.named(self._actor_name(part))
        if actor is None:
            known = ", ".join(self.parts())
            raise NotFound(f"the service has no part {part[:80]!r}; it has {known}")
        try:
            yield from get_log(
                actor_id=actor._actor_id.hex(),  # pyright: ignore[reportPrivateUsage]
                follow=follow,
                tail=lines,
                suffix="out" if printed else "err",
                errors="replace",
                filter_ansi_code=plain,
            )
        except (RayStateApiException, OSError, ValueError) as error:  # OSError: no connection
            raise Unavailable(
                f"Ray's dashboard, which reads logs on all machines, does not answer: {error}"
            ) from None

    def newest(self, part: str, lines: int) -> str:
        """Return the newest lines of a part's log as one text, without colours."""
        return "".join(self.read(part, lines, plain=True))
