"""Create the models of a rank whose passes run in JAX."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from skyrl_actors.config.strategies import JaxStrategy, StrategyConfig
from skyrl_actors.jax_workers.architecture import architecture_of
from skyrl_actors.jax_workers.arrays import Devices
from skyrl_actors.jax_workers.devices import cache_of, configure, device_for
from skyrl_actors.jax_workers.loading import load_network, shapes_of
from skyrl_actors.jax_workers.mesh import MeshGroups, groups_of, join
from skyrl_actors.jax_workers.network import JaxNetwork
from skyrl_actors.jax_workers.prepare import prepare, usual_passes
from skyrl_actors.jax_workers.proof import prove_equal
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import WorkerSpec
from skyrl_actors.workers.meta_model import weights_of
from skyrl_actors.workers.model_factory import ModelFactory, collective
from skyrl_actors.workers.models import TrainedModel, lora_tensors, value_head_tensors
from skyrl_actors.workers.network import UNEMBED_WEIGHT, Network
from skyrl_actors.workers.published_names import StoredForm
from skyrl_actors.workers.tensor_files import Source, whole


class JaxModelFactory(ModelFactory):
    """Create models over a base whose passes run in JAX. Torch holds what optimizers change."""

    def __init__(self, spec: WorkerSpec, strategy: JaxStrategy, address: str):
        super().__init__(spec, torch.device("cpu"))
        configure()
        self._strategy = strategy
        self._mesh: MeshGroups | None = None
        self._devices: Devices
        if strategy.mesh_ranks == 1:
            self._devices = device_for(spec.device)
        else:
            self._mesh = groups_of(spec, strategy.mesh_ranks)
            self._devices = join(spec, strategy, self._mesh, address)

    def _frozen(self, strategy: StrategyConfig) -> Network:
        folder = self.spec.base_folder
        arch = architecture_of(folder)
        if self.spec.router_replay and not arch.experts:
            raise ConfigError(
                f"router_replay=true, but {arch.name} has no routed experts to replay; "
                "set router_replay=false"
            )
        made = load_network(
            folder, self.dtype, self.spec.activations, self._devices, cache_of(self._strategy)
        )
        made.score_uncounted = self.spec.score_uncounted
        made.max_adapters = self.spec.max_adapters
        collective(self.spec, lambda: self._prove(made))
        return made

    def _prove(self, network: JaxNetwork) -> None:
        """Raise ConfigError on all ranks of a mesh if the first finds a difference."""
        mesh, replays = self._mesh, self.spec.router_replay

        def prove(compares: bool) -> None:
            prove_equal(network, self.spec.base_folder, self.dtype, compares, replays)

        if mesh is None:
            prove(compares=True)
            return
        found = ""
        try:
            prove(compares=self.spec.rank == mesh.first)
        except ConfigError as error:
            found = str(error)
        if found := mesh.texts(found)[0]:
            raise ConfigError(found)

    def prepare(self) -> None:
        """Compile the usual programs of adapters of the largest rank on all layers."""
        base = self.base
        assert isinstance(base, JaxNetwork)
        views = lora_tensors(LoraSpec(rank=self.spec.max_rank), 0, base)
        if self.spec.role == "critic":
            views |= value_head_tensors(base)
        passes = usual_passes(base, views, self.spec.microbatch_tokens)
        prepare((each.prepare for each in passes), self.spec.num_threads, self._strategy.prepare_s)
        base.forget(views)

    def programs_text(self) -> str:
        """Describe the programs of this rank; "" before the base is loaded.

        Other threads may call it at any time.
        """
        base = self._base
        if not isinstance(base, JaxNetwork):
            return ""
        counters = base.programs.counters
        padding = counters.computed / counters.tokens - 1 if counters.tokens else 0.0
        return (
            f"{counters.programs} for {len(base.programs.shapes)} shapes, {counters.read} of them "
            f"from the cache, in {counters.seconds:.1f} s; padding {padding:.1%}"
        )

    def _reduce(self, gradients: Tensor) -> None:
        mesh = self._mesh
        if mesh is None:
            super()._reduce(gradients)
        else:
            collective(self.spec, lambda: mesh.sum_over_copies(gradients))

    @contextmanager
    def _weights(self, module: torch.nn.Module) -> Iterator[Source]:
        shapes, form = shapes_of(module), StoredForm(module)
        with weights_of(self.spec.base_folder, self.dtype, form, shapes) as source:
            yield source

    def _full(self, spec: ModelSpec) -> TrainedModel:
        network, is_critic = self.base, spec.role == "critic"
        tensors: dict[str, Tensor] = {}
        with self._weights(network.module) as source:
            for name in source.shapes:
                if not (is_critic and name == UNEMBED_WEIGHT):  # no part of the values
                    tensors[name] = whole(source, name).float()
        if is_critic:
            tensors |= value_head_tensors(network)
        # Views in float32: a program rounds them itself, and gradients need no copy.
        state = FlatState(
            tensors,
            self.device,
            reduce=self._reduce,
            writes=self.writes,
            optimizer=spec.optimizer,
        )
        return TrainedModel(spec, network, state)
