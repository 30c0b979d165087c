"""The kinds of requests. Each module holds everything that the controller knows of one kind."""

from collections.abc import Callable
from typing import Any

from skyrl_actors.controller.verbs.create_model import CreateModelVerb
from skyrl_actors.controller.verbs.forward_backward import ForwardBackwardVerb
from skyrl_actors.controller.verbs.load_weights import LoadWeightsVerb
from skyrl_actors.controller.verbs.optim_step import OptimStepVerb
from skyrl_actors.controller.verbs.sample import SampleVerb
from skyrl_actors.controller.verbs.save_external import SaveExternalVerb
from skyrl_actors.controller.verbs.save_for_sampler import SaveForSamplerVerb
from skyrl_actors.controller.verbs.save_weights import SaveWeightsVerb
from skyrl_actors.controller.verbs.unload import UnloadVerb
from skyrl_actors.controller.verbs.verb import ModelVerb, Verb
from skyrl_actors.journal.kinds import Kinds
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import InternalError

SAMPLE = SampleVerb()
MODEL_VERBS: dict[str, ModelVerb[Any]] = {
    rq.CreateModel.__name__: CreateModelVerb(),
    rq.ForwardBackward.__name__: ForwardBackwardVerb(),
    rq.OptimStep.__name__: OptimStepVerb(),
    rq.SaveWeights.__name__: SaveWeightsVerb(),
    rq.SaveForSampler.__name__: SaveForSamplerVerb(),
    rq.SaveExternal.__name__: SaveExternalVerb(),
    rq.LoadWeights.__name__: LoadWeightsVerb(),
    rq.Unload.__name__: UnloadVerb(),
}


def _having(holds: Callable[[ModelVerb[Any]], bool]) -> frozenset[str]:
    return frozenset(kind for kind, verb in MODEL_VERBS.items() if holds(verb))


(CREATES,) = _having(lambda verb: verb.creates_model)
(ENDS,) = _having(lambda verb: verb.ends_model)
KINDS = Kinds(
    creates=CREATES,
    ends=ENDS,
    settles=_having(lambda verb: verb.settles),
    failure_matters=_having(lambda verb: verb.failure_matters),
    reads_files=_having(lambda verb: verb.can_read_files),
)
"""What the journal needs to know of the kinds of requests."""


def verb_of(request: rq.Request) -> Verb[Any]:
    """Return the verb of a request of any kind."""
    return SAMPLE if isinstance(request, rq.Sample) else MODEL_VERBS[type(request).__name__]


def verb_of_model(request: rq.Request) -> ModelVerb[Any]:
    """Return the verb of a request to a model."""
    return MODEL_VERBS[type(request).__name__]


def model_verb(kind: str) -> ModelVerb[Any]:
    """Return the verb of a kind in the journal. Raises InternalError for an unknown one."""
    if kind not in MODEL_VERBS:
        raise InternalError(
            f"the journal holds a request of the unknown kind {kind!r}; "
            "start the version of this project that wrote it"
        )
    return MODEL_VERBS[kind]
