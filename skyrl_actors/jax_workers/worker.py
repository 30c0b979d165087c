"""A training rank whose passes run in JAX. Torch holds, reads and writes the models' tensors."""

from dataclasses import replace

from skyrl_actors.config.strategies import JaxStrategy
from skyrl_actors.jax_workers.factory import JaxModelFactory
from skyrl_actors.jax_workers.network import JaxNetwork
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.workers.interface import BaseModelInfo, WorkerSpec
from skyrl_actors.workers.model_factory import ModelFactory
from skyrl_actors.workers.state import is_whole
from skyrl_actors.workers.torch_worker import TorchWorker


class JaxWorker(TorchWorker):
    """Implement the verbs of `TrainWorker` on one rank with JAX."""

    def __init__(self, spec: WorkerSpec):
        super().__init__(replace(spec, device="cpu"))  # of torch
        self._asked = spec

    def paths(self) -> dict[str, str]:
        found = super().paths() | {"attention": "XLA", "head": "XLA"}
        factory, strategy = self._model_factory, self._asked.strategy
        if isinstance(factory, JaxModelFactory) and (text := factory.programs_text()):
            found["programs"] = text
        if isinstance(strategy, JaxStrategy) and strategy.mesh_ranks > 1:
            found["mesh"] = f"{strategy.fsdp} fsdp x {strategy.tensor} tensor"
        return found

    def setup(self, address: str, port: int) -> BaseModelInfo:
        info = super().setup(address, port)
        factory = self.model_factory
        if self.spec.preload and isinstance(factory, JaxModelFactory):
            factory.prepare()
        return info

    def _free(self, model_id: str) -> None:
        model = self.models.get(model_id)
        if model is not None and isinstance(model.network, JaxNetwork) and is_whole(model.state):
            model.network.forget(model.state.views)
        super()._free(model_id)

    def _new_factory(self) -> ModelFactory:
        strategy = self._asked.strategy
        if not isinstance(strategy, JaxStrategy):
            raise InternalError(f"a JAX rank cannot have strategy {strategy.type}")
        return JaxModelFactory(self._asked, strategy, self._address)
