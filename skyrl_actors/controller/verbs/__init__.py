"""The kinds of requests. Each module holds everything that the controller knows of one kind."""

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
