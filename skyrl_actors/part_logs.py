"""Read the logs of a service's parts, on whatever machine they are, through Ray's dashboard."""

from collections.abc import Iterator

from ray.util.state import get_log
from ray.util.state.exception import RayStateApiException

from skyrl_actors import remote
from skyrl_actors.messages.errors import NotFound, Unavailable

HIDDEN = "standby"  # processes without a part of their own


class PartLogs:
    """The logs of one service. A part is a name such as `controller` or `engine:0`."""

    def __init__(self, service: str):
        self._prefix = f"{service}:"

    def parts(self) -> list[str]:
        """Return the names of the living parts."""
        names = (name.removeprefix(self._prefix) for name in remote.names_with(self._prefix))
        return sorted(name for name in names if not name.startswith(HIDDEN))

    def read(
        self, part: str, lines: int, *, follow: bool = False, printed: bool = False, plain: bool
    ) -> Iterator[str]:
        """Yield the newest lines of a part's log, and with `follow` also the next ones.

        `printed`: standard output instead of the log. `plain`: without colours.

        Raises NotFound for an unknown part, and Unavailable when the dashboard does not answer.
        """
        actor = remote.named(f"{self._prefix}{part}")
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
