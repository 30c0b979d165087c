"""Who is here: sessions, their models, their samplers (pure tables, no effects)."""

from collections import OrderedDict
from dataclasses import dataclass, field

from skyrl_actors.controller.silence import SilenceClock
from skyrl_actors.messages.errors import InternalError, InvalidRequest, NotFound
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.weights import SamplerWeights

DROPPED = "only the newest unnamed versions of a model are kept; use save_weights_for_sampler with a name for one that stays"


@dataclass(slots=True)
class Session:
    session_id: str
    last_seen: float  # by `TenantTable.silence`
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True)
class Model:
    spec: ModelSpec
    session_id: str
    user_metadata: dict[str, str]
    ready: bool = False
    steps: int = 0
    versions: int = 0  # sampler versions made so far
    incomplete: str | None = None  # why the pending gradients are not what was asked for


@dataclass(slots=True)
class Sampler:
    sampler_id: str
    base_model: str
    model_path: str | None
    weights: SamplerWeights
    session_id: str | None
    owner: str | None = None  # the model whose unnamed version this is
    number: int | None = None  # the operation that froze it
    users: int = 0  # accepted samples that are not answered yet
    retired: bool = False  # its files go when the last user has gone
    last_used: float = 0.0  # loop time of its opening or its last answer
    ended: str = DROPPED  # what a client is told that asks for it after it was retired


class TenantTable:
    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: OrderedDict[str, Sampler] = OrderedDict()
        self.lost: dict[str, str] = {}  # models that can not be brought back, and why
        self.silence = SilenceClock()
        self._expired: dict[str, str] = {}  # samplers of living sessions that were retired, and why

    def hear(self, session_id: str | None, now: float) -> None:
        """A client is heard, of this session if it is one that lives."""
        at = self.silence.hear(now)
        if session_id in self.sessions:
            self.sessions[session_id].last_seen = at

    def session(self, session_id: str) -> Session:
        if session_id not in self.sessions:
            raise NotFound(f"unknown session {session_id!r}: it was never made, was finished, or fell silent for too long")
        return self.sessions[session_id]

    def model(self, model_id: str) -> Model:
        if model_id in self.lost:
            raise InternalError(f"model {model_id} is lost: {self.lost[model_id]}")
        if model_id not in self.models:
            raise NotFound(f"unknown model {model_id!r}: it was never made, or its session is over")
        return self.models[model_id]

    def policy(self, model_id: str) -> Model:
        """A model that can be sampled. Raises InvalidRequest for a critic."""
        model = self.model(model_id)
        if model.spec.role == "critic":
            raise InvalidRequest(f"{model_id} is a critic: it has values, not tokens, and can not be sampled")
        return model

    def sampler(self, sampler_id: str) -> Sampler:
        if sampler_id in self.samplers:
            return self.samplers[sampler_id]
        if sampler_id in self._expired:
            raise NotFound(f"sampler {sampler_id!r} was dropped: {self._expired[sampler_id]}")
        raise NotFound(f"unknown sampler {sampler_id!r}")

    def add_sampler(self, sampler: Sampler, keep: int) -> list[Sampler]:
        """Returns the unnamed samplers of the same model that are now one too many, oldest first, already removed."""
        self.samplers[sampler.sampler_id] = sampler
        if sampler.owner is None:
            return []
        mine = [s for s in self.samplers.values() if s.owner == sampler.owner]
        dropped = mine[: max(0, len(mine) - keep)]
        for old in dropped:
            self.remove_sampler(old.sampler_id)
        return dropped

    def remove_sampler(self, sampler_id: str) -> None:
        sampler = self.samplers.pop(sampler_id, None)
        if sampler is not None and sampler.session_id is not None:
            self._expired[sampler_id] = sampler.ended

    def forget_expired(self, session_id: str) -> None:
        self._expired = {
            sampler_id: why for sampler_id, why in self._expired.items() if not sampler_id.startswith(f"{session_id}:")
        }

    def models_of(self, session_id: str) -> list[Model]:
        return [model for model in self.models.values() if model.session_id == session_id]

    def samplers_of(self, session_id: str) -> list[Sampler]:
        return [sampler for sampler in self.samplers.values() if sampler.session_id == session_id]

    def silent_sessions(self, now: float, timeout_s: float) -> list[str]:
        """Silent for longest first. The time in which no client was heard does not count."""
        now = self.silence.at(now)
        silent = [s for s in self.sessions.values() if now - s.last_seen > timeout_s]
        return [s.session_id for s in sorted(silent, key=lambda s: s.last_seen)]
