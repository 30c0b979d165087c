"""Create the models of a rank whose passes run in JAX."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import torch
from torch import Tensor

from skyrl_actors.config.strategies import JaxStrategy, StrategyConfig
from skyrl_actors.jax_workers.architecture import architecture_of
from skyrl_actors.jax_workers.arrays import Device
from skyrl_actors.jax_workers.network import JaxNetwork
from skyrl_actors.jax_workers.prepare import prepare, usual_passes
from skyrl_actors.jax_workers.proof import prove_equal
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.storage.private_folders import make_folder
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import WorkerSpec
from skyrl_actors.workers.meta_model import own_names, shell, weights_of
from skyrl_actors.workers.model_factory import ModelFactory, collective
from skyrl_actors.workers.models import TrainedModel, lora_tensors, value_head_tensors
from skyrl_actors.workers.network import UNEMBED_WEIGHT, Network
from skyrl_actors.workers.published_names import StoredForm
from skyrl_actors.workers.tensor_files import Source, whole


def configure(strategy: JaxStrategy) -> None:
    """Set what JAX reads at its first use."""
    folder = strategy.cache or default_cache()
    make_folder(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # TPUs and GPUs round products of float32 otherwise.
    jax.config.update("jax_default_matmul_precision", "highest")


def default_cache() -> Path:
    """Return the folder of compiled programs if the config names none."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "skyrl-actors" / "jax"


def device_for(kind: str) -> Device:
    """Return the device of a rank. Raises ConfigError if JAX does not see one of this kind."""
    if kind == "cpu":
        return jax.devices("cpu")[0]
    found = [device for device in jax.devices() if device.platform != "cpu"]
    if not found:
        seen = ", ".join(str(device) for device in jax.devices())
        raise ConfigError(
            f"strategy jax: placement.device is {kind}, and JAX sees only {seen}; install JAX "
            "for this accelerator, for example pip install 'jax[cuda12]'"
        )
    return found[0]


class JaxModelFactory(ModelFactory):
    """Create models over a base whose passes run in JAX. Torch holds what optimizers change."""

    def __init__(self, spec: WorkerSpec, strategy: JaxStrategy):
        super().__init__(spec, torch.device("cpu"))
        configure(strategy)
        self._strategy = strategy
        self._jax_device = device_for(spec.device)

    def _frozen(self, strategy: StrategyConfig) -> Network:
        folder = self.spec.base_folder
        arch = architecture_of(folder)
        if self.spec.router_replay and not arch.experts:
            raise ConfigError(
                f"router_replay=true, but {arch.name} has no routed experts to replay; "
                "set router_replay=false"
            )
        module = shell(folder, self.dtype)
        with self._weights(module) as source:
            made = JaxNetwork(
                module,
                arch,
                lambda name: whole(source, name),
                self.dtype,
                self.spec.activations,
                self._jax_device,
            )
            made.score_uncounted = self.spec.score_uncounted
            made.max_adapters = self.spec.max_adapters
            collective(self.spec, lambda: prove_equal(made, folder, self.dtype))
        return made

    def prepare(self) -> None:
        """Compile the usual programs of adapters of the largest rank on all layers."""
        base = self.base
        assert isinstance(base, JaxNetwork)
        views = lora_tensors(LoraSpec(rank=self.spec.max_rank), 0, base)
        if self.spec.role == "critic":
            views |= value_head_tensors(base)
        passes = usual_passes(base, views, self.spec.microbatch_tokens)
        prepare(passes, self.spec.num_threads, self._strategy.prepare_s)
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

    @contextmanager
    def _weights(self, module: torch.nn.Module) -> Iterator[Source]:
        shapes = {name: tuple(weight.shape) for name, weight in own_names(module).items()}
        with weights_of(self.spec.base_folder, self.dtype, StoredForm(module), shapes) as source:
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
