"""Which operation of a model, on which state of it (frozen)."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Turn:
    """Operation `number`, to be done to the state that operation `after` left. `number` None: it leaves the state as it is;
    `after` None: whatever the state is, it is replaced.

    Ranks refuse a turn on another state, so that no fault in the books can become a wrong number. `request_id` is for traces and logs only.
    """

    number: int | None
    after: int | None = None
    request_id: str = field(default="", compare=False)
