"""Tables of the live sessions, their models and their samplers (pure, no effects)."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from skyrl_actors.controller.silence import SilenceClock
from skyrl_actors.messages.errors import InternalError, NotFound
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.weights import SamplerWeights

DROPPED = (
    "only the newest unnamed versions of a model are kept; "
    "use save_weights_for_sampler with a name for one that stays"
)


@dataclass(slots=True)
class TenantSession:
    """A live session."""

    session_id: str
    last_seen: float  # time of the last request or heartbeat, by `TenantTable.silence`
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    polls: int = 0  # of its client, that wait for an answer now


@dataclass(slots=True, kw_only=True)
class Model:
    """A model of a live session. `ready` becomes true when its creation was done."""

    spec: ModelSpec
    session_id: str
    user_metadata: dict[str, str]
    ready: bool = False
    steps: int = 0
    versions: int = 0  # number of unnamed sampler versions so far
    incomplete: str | None = None  # why a forward_backward since the last step failed


@dataclass(slots=True, kw_only=True)
class Sampler:
    """An open sampler: fixed weights of the base model, of a checkpoint or of a live model."""

    sampler_id: str
    base_model: str
    model_path: str | None
    weights: SamplerWeights
    session_id: str | None
    owner: str | None = None  # the model whose unnamed version this is
    number: int | None = None  # the operation that saved these weights
    users: int = 0  # accepted samples that are not answered yet
    retired: bool = False  # closed; its files are removed with its last user
    last_used: float = 0.0  # loop time of its opening or its last answer
    ended: str = DROPPED  # the reason in the error for requests after it was retired


class TenantTable:
    """All live sessions, models and samplers. Lookups raise UserError for unknown ids."""

    def __init__(self) -> None:
        self.sessions: dict[str, TenantSession] = {}
        self.models: dict[str, Model] = {}
        self._samplers: OrderedDict[str, Sampler] = OrderedDict()
        self._writing: Counter[str] = Counter()  # samplers whose opening the journal writes
        self.samplers: Mapping[str, Sampler] = MappingProxyType(self._samplers)
        self.lost: dict[str, str] = {}  # models that cannot be restored, and why
        self.silence = SilenceClock()
        # By live session: its retired samplers, and why.
        self._expired: dict[str, dict[str, str]] = {}
        self._unnamed: dict[str, OrderedDict[str, Sampler]] = {}  # by their model
        self._leaving: dict[int, Sampler] = {}  # retired, with unanswered samples, by identity
        self._of_version: Counter[str] = Counter()  # open and leaving ones

    def mark_active(self, session_id: str | None, now: float) -> None:
        """Record a sign of life of a client at loop time `now`, and of its session if live."""
        at = self.silence.mark_active(now)
        if session_id in self.sessions:
            self.sessions[session_id].last_seen = at

    @contextmanager
    def polled(self, session_id: str | None, clock: Callable[[], float]) -> Generator[None]:
        """Count a poll of a session's client, which is there meanwhile. `clock` is loop time."""
        self.mark_active(session_id, clock())
        session = self.sessions.get(session_id or "")
        if session is None:
            yield
            return
        session.polls += 1
        try:
            yield
        finally:
            session.polls -= 1
            self.mark_active(session_id, clock())

    def session(self, session_id: str) -> TenantSession:
        """Return a live session. Raises NotFound."""
        if session_id not in self.sessions:
            raise NotFound(
                f"unknown session {session_id!r}: it was never created, was finished, "
                "or sent no heartbeat for too long"
            )
        return self.sessions[session_id]

    def model(self, model_id: str) -> Model:
        """Return a live model. Raises NotFound, or InternalError when its state is lost."""
        if model_id in self.lost:
            raise InternalError(f"model {model_id} is lost: {self.lost[model_id]}")
        if model_id not in self.models:
            raise NotFound(
                f"unknown model {model_id!r}: it was never created, or its session has ended"
            )
        return self.models[model_id]

    def sampler(self, sampler_id: str) -> Sampler:
        """Return an open sampler. Raises NotFound, with the reason if it was retired."""
        if sampler_id in self.samplers:
            return self.samplers[sampler_id]
        why = self._expired.get(sampler_id.partition(":")[0], {}).get(sampler_id)
        if why is not None:
            raise NotFound(f"sampler {sampler_id!r} was dropped: {why}")
        raise NotFound(f"unknown sampler {sampler_id!r}")

    def is_stream(self, stream: str) -> bool:
        """Return whether this is the id of an open session, model or sampler.

        A retired sampler with unanswered samples counts as open.
        """
        return (
            stream in self.sessions
            or stream in self.models
            or stream in self.samplers
            or any(sampler.sampler_id == stream for sampler in self._leaving.values())
        )

    @contextmanager
    def writes(self, sampler_id: str) -> Generator[None]:
        """Count a sampler as open while the journal writes its opening."""
        self._writing[sampler_id] += 1
        try:
            yield
        finally:
            self._writing[sampler_id] -= 1
            self._writing += Counter()  # without zeros

    def is_opened(self, sampler_id: str) -> bool:
        """Return whether a sampler is open, or about to be: one that is shared opens again."""
        return sampler_id in self.samplers or sampler_id in self._writing

    def had_sampler(self, sampler_id: str) -> bool:
        """Return whether a sampler is open, or was retired and its session is open."""
        retired = self._expired.get(sampler_id.partition(":")[0], {})
        return sampler_id in self.samplers or sampler_id in retired

    def add_sampler(self, sampler: Sampler, keep: int) -> list[Sampler]:
        """Add a sampler, and retire the model's oldest unnamed samplers beyond `keep`.

        Returns those of them that no sample needs, oldest first.
        """
        self.put_sampler(sampler)
        mine = self.unnamed_samplers(sampler.owner or "")
        return [old for old in mine[: max(0, len(mine) - keep)] if self.retire(old)]

    def put_sampler(self, sampler: Sampler) -> None:
        """Add a sampler, and remove none but an earlier one of this id."""
        self._drop(sampler.sampler_id)
        self._samplers[sampler.sampler_id] = sampler
        self._of_version[sampler.weights.version] += 1
        if sampler.owner is not None:
            mine = self._unnamed.setdefault(sampler.owner, OrderedDict())
            mine[sampler.sampler_id] = sampler

    def unnamed_samplers(self, model_id: str) -> list[Sampler]:
        """Return the open samplers of a model's unnamed versions, oldest first."""
        return list(self._unnamed[model_id].values()) if model_id in self._unnamed else []

    def needed_samplers(self, model_id: str) -> list[Sampler]:
        """Return the samplers of a model's unnamed versions that are open or still have samples."""
        leaving = [s for s in self._leaving.values() if s.owner == model_id]
        return leaving + self.unnamed_samplers(model_id)

    def has_version(self, version: str) -> bool:
        """Return whether a sampler that is open or still has samples has these weights."""
        return self._of_version[version] > 0

    def retire(self, sampler: Sampler) -> bool:
        """Close a sampler, and keep the reason for later requests of its session.

        Returns True if no sample needs it. Otherwise `left` is called after its last one.
        """
        sampler_id, sampler.retired = sampler.sampler_id, True
        if self._samplers.get(sampler_id) is sampler:
            self._drop(sampler_id)
            if sampler.session_id is not None:
                expired = self._expired.setdefault(sampler_id.partition(":")[0], {})
                expired[sampler_id] = sampler.ended
        if sampler.users and id(sampler) not in self._leaving:
            self._leaving[id(sampler)] = sampler
            self._of_version[sampler.weights.version] += 1
        return not sampler.users

    def left(self, sampler: Sampler) -> None:
        """Forget a retired sampler whose last sample was answered."""
        if self._leaving.pop(id(sampler), None) is not None:
            self._count_less(sampler.weights.version)

    def _drop(self, sampler_id: str) -> None:
        sampler = self._samplers.pop(sampler_id, None)
        if sampler is None:
            return
        self._count_less(sampler.weights.version)
        if sampler.owner is not None:
            mine = self._unnamed[sampler.owner]
            del mine[sampler_id]
            if not mine:
                del self._unnamed[sampler.owner]

    def _count_less(self, version: str) -> None:
        self._of_version[version] -= 1
        if not self._of_version[version]:
            del self._of_version[version]

    def forget_expired(self, session_id: str) -> None:
        """Forget the retired samplers of a session that ended."""
        self._expired.pop(session_id, None)

    def models_of(self, session_id: str) -> list[Model]:
        return [model for model in self.models.values() if model.session_id == session_id]

    def samplers_of(self, session_id: str) -> list[Sampler]:
        return self.samplers_by_session().get(session_id, [])

    def samplers_by_session(self) -> dict[str | None, list[Sampler]]:
        """Return the open samplers of each session. Other threads may call this."""
        found: dict[str | None, list[Sampler]] = {}
        for sampler in list(self.samplers.values()):
            found.setdefault(sampler.session_id, []).append(sampler)
        return found

    def silent_sessions(self, now: float, timeout_s: float) -> list[str]:
        """Return sessions without a sign of life for `timeout_s`, the longest silent first.

        A session whose client polls is not silent. Time in which no client reached the service
        does not count.
        """
        now = self.silence.at(now)
        silent = [
            s for s in self.sessions.values() if not s.polls and now - s.last_seen > timeout_s
        ]
        return [s.session_id for s in sorted(silent, key=lambda s: s.last_seen)]
