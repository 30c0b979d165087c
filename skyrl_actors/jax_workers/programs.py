"""The compiled programs of a rank: for each shape of a pass, a forward and a backward.

The losses lie between the two and are no part of them. So a loss that is not finite is refused
before a gradient flows, and no loss needs a program.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from skyrl_actors.jax_workers.architecture import Architecture
from skyrl_actors.jax_workers.arrays import Devices
from skyrl_actors.jax_workers.decoder import Decoder, Rows
from skyrl_actors.jax_workers.executables import ExecutableFiles, Made
from skyrl_actors.jax_workers.head import Asked, Head, Way, score, slopes, way_of
from skyrl_actors.jax_workers.low_rank import Slots, by_block


@dataclass(frozen=True, kw_only=True)
class Shape:
    """All that a program depends on."""

    tokens: int
    window: int  # no row is longer
    block: int  # of tokens that belong to one model
    slots: int  # places for adapters; 0: a full fine-tune
    rank: int  # of the largest adapter, rounded up
    kinds: tuple[str, ...]  # of the layers that adapters of this pass have
    head: bool  # whether adapters have the output layer
    targets: int  # of a token; 0: values
    entropy_gradient: bool
    truncates: bool
    outer: int = 0  # matrices of the factor at the hidden size, of adapters on experts
    replays: bool = False  # whether the batch has routes

    def __str__(self) -> str:
        who = "full" if not self.slots else f"{self.slots} adapters of rank {self.rank}"
        return f"{self.tokens} tokens, rows of {self.window}, {who}"


class Batch(NamedTuple):
    """The inputs of a pass."""

    tokens: Array  # [T] int32
    rows: Rows
    slots: Slots
    asked: Asked | None  # None: values
    routes: Array | None = None  # [layers, T, K] int32: the experts to compute, plus 1


# A [layers, r, in] or [r, in], and B [..., out, r]; of experts [layers, E, r, in]
Factors = tuple[Array, Array]


class Adapter(NamedTuple):
    """The tensors of one adapter, or with an axis [S] before the last two, of all in a pass."""

    layers: Mapping[str, Factors]
    head: Factors | None
    value: Factors | None  # a critic's weight [1, H] and bias [1]


class Base(NamedTuple):
    """The weights of a model."""

    embed: Array  # [V, H]
    layers: Mapping[str, Array]  # each [layers, ...]
    norm: Array  # [H]
    head: Array | None  # [V, H]; None: tied to the embedding, or a critic's
    value: Factors | None = None  # a full critic's


class Kept(NamedTuple):
    """What a forward program hands to its backward program."""

    layers: Any
    last: Array  # [T, H], the result of the layers
    head: Any


class Pair:
    """The programs of one shape. `trained` is an adapter for each slot, or a Base."""

    def __init__(self, arch: Architecture, shape: Shape, recompute: bool, devices: Devices):
        self._arch, self._shape = arch, shape
        self._whole = not shape.slots
        self._decoder = Decoder(arch, shape.window, self._whole, recompute, devices.spread)
        trained = self._whole or shape.head
        self._way: Way = way_of(
            shape.tokens, arch.vocab, trained, shape.entropy_gradient, shape.targets
        )

    @property
    def is_traced(self) -> bool:
        """Whether `forward` was traced, which `backward` needs."""
        return self._decoder.scan.is_traced

    def predict(self, base: Base | None, trained: Any, batch: Batch) -> Any:
        """Return `Scored`, or values [T]."""
        weights, trained, layers = self._weights(base, trained, batch)
        rest = self._decoder.rest(batch.rows, batch.slots, weights.embed.dtype)
        x = self._decoder.embedded(weights.embed, batch.tokens)
        x = self._decoder.scan.plain(x, *layers, rest)
        return self._predicted(weights, trained, x, batch, None)[0]

    def forward(self, base: Base | None, trained: Any, batch: Batch) -> tuple[Any, Kept]:
        weights, trained, layers = self._weights(base, trained, batch)
        rest = self._decoder.rest(batch.rows, batch.slots, weights.embed.dtype)
        x = self._decoder.embedded(weights.embed, batch.tokens)
        x, kept = self._decoder.scan.forward(x, *layers, rest)
        found, kept_head = self._predicted(weights, trained, x, batch, self._way)
        return found, Kept(kept, x, kept_head)

    def backward(
        self, base: Base | None, trained: Any, batch: Batch, kept: Kept, given: Any
    ) -> Any:
        """Return the gradients of the trained tensors in float32."""
        weights, trained, layers = self._weights(base, trained, batch)
        rest = self._decoder.rest(batch.rows, batch.slots, weights.embed.dtype)
        h, back_norm = jax.vjp(self._decoder.norm, kept.last, weights.norm)
        of_value, of_head, of_weight = None, None, None
        if batch.asked is None:
            _, back = jax.vjp(self._values, h, self._value_of(trained), batch)
            of_h, of_value, _ = back(given)
        else:
            head = self._head(weights, trained)
            of_h, of_weight, of_head = slopes(
                h, head, batch.slots, batch.asked, self._way, kept.head, given, self._whole
            )
        of_x, of_norm = back_norm(of_h)
        of_x, of_layers = self._decoder.scan.backward(of_x, kept.layers, *layers, rest)
        if self._whole:
            return self._of_weights(weights, batch, of_x, of_layers, of_norm, of_weight, of_value)
        found = Adapter(of_layers, of_head, of_value)
        return jax.tree.map(lambda x: x.astype(jnp.float32), found)

    def _weights(
        self, base: Base | None, trained: Any, batch: Batch
    ) -> tuple[Base, Any, tuple[Any, Any]]:
        if self._whole:
            return trained, trained, self._decoder.parts(trained.layers, {}, batch.routes)
        assert base is not None
        adapters = stacked(trained)
        return base, adapters, self._decoder.parts(base.layers, adapters.layers, batch.routes)

    def _head(self, weights: Base, trained: Any) -> Head:
        weight = weights.embed if weights.head is None else weights.head
        return Head(weight, None if self._whole else trained.head)

    def _predicted(
        self, weights: Base, trained: Any, x: Array, batch: Batch, way: Way | None
    ) -> tuple[Any, Any]:
        h = self._decoder.norm(x, weights.norm)
        if batch.asked is None:
            return self._values(h, self._value_of(trained), batch), ()
        return score(h, self._head(weights, trained), batch.slots, batch.asked, way)

    def _value_of(self, trained: Any) -> Factors:
        weight, bias = trained.value
        return (weight[None], bias[None]) if self._whole else (weight, bias)

    def _values(self, h: Array, value: Factors, batch: Batch) -> Array:
        """Return [T] float32 from weights [S, 1, H] and biases [S, 1]."""
        weight, bias = value
        blocks = by_block(h.astype(weight.dtype), len(batch.slots.of_block))
        of_block = batch.slots.of_block
        return (jnp.einsum("nth,nh->nt", blocks, weight[of_block, 0]) + bias[of_block]).reshape(-1)

    def _of_weights(
        self,
        weights: Base,
        batch: Batch,
        of_x: Array,
        of_layers: Any,
        of_norm: Array,
        of_weight: Array | None,
        of_value: Any,
    ) -> Base:
        of_x = self._scaled(of_x).astype(jnp.float32)
        if self._arch.no_gradient is not None:
            of_x = jnp.where((batch.tokens == self._arch.no_gradient)[:, None], 0, of_x)
        of_embed = jnp.zeros(weights.embed.shape, jnp.float32).at[batch.tokens].add(of_x)
        of_head = None
        if of_weight is not None and weights.head is None:
            of_embed = of_embed + of_weight
        elif weights.head is not None:
            of_head = of_weight
        value = None if of_value is None else (of_value[0][0], of_value[1][0])
        found = Base(of_embed, of_layers, of_norm, of_head, value)
        return jax.tree.map(lambda x: x.astype(jnp.float32), found)

    def _scaled(self, of_x: Array) -> Array:
        scale = self._arch.embed_scale
        return of_x if scale == 1.0 else of_x * jnp.asarray(scale, of_x.dtype)


@dataclass
class Compiled:
    """Counters of the programs of a rank or an engine."""

    programs: int = 0
    read: int = 0  # of them, from their files
    seconds: float = 0.0  # to compile or to read them, added up over threads
    tokens: int = 0  # that were asked for
    computed: int = 0  # with padding

    def add(self, made: Made) -> None:
        self.programs += 1
        self.read += made.was_read
        self.seconds += made.seconds


class Programs:
    """The programs that were needed until now, compiled once for each shape."""

    def __init__(
        self, arch: Architecture, recompute: bool, devices: Devices, files: ExecutableFiles
    ):
        self._arch, self._recompute, self._devices = arch, recompute, devices
        self._files = files
        self._pairs: dict[Shape, Pair] = {}
        self._made: dict[tuple[Shape, str], Callable[..., Any]] = {}
        self._counting, self._tracing = threading.Lock(), threading.Lock()
        self.counters = Compiled()

    def run(self, shape: Shape, name: str, *arguments: Any) -> Any:
        """Run `predict`, `forward` or `backward` of a shape."""
        return self._program(shape, name, lambda: arguments)(*arguments)

    def prepare(self, shape: Shape, arguments: tuple[Any, ...], given: Any) -> None:
        """Compile the programs of a shape. Several threads may prepare different shapes.

        `arguments` are those of a forward pass, `given` the slopes of its results.
        """
        self._program(shape, "predict", lambda: arguments)
        forward: Any = self._program(shape, "forward", lambda: arguments)

        def of_backward() -> tuple[Any, ...]:
            _, kept = jax.eval_shape(self._pairs[shape].forward, *arguments)
            _, shardings = forward.output_shardings
            return *arguments, jax.tree.map(_with_sharding, kept, shardings), given

        self._program(shape, "backward", of_backward)

    def ready(self, shape: Shape, arguments: tuple[Any, ...], given: Callable[[], Any]) -> None:
        """Compile `forward` and `backward` at the same time if both are missing.

        On a mesh, `backward` needs the places of what the compiled `forward` keeps.
        """
        if not self._devices.alone or (shape, "forward") in self._made:
            return

        def of_backward() -> tuple[Any, ...]:
            with self._tracing:
                _, kept = jax.eval_shape(self._pairs[shape].forward, *arguments)
            return *arguments, kept, given()

        with ThreadPoolExecutor(1) as beside:
            backward = beside.submit(self._program, shape, "backward", of_backward)
            self._program(shape, "forward", lambda: arguments)
            backward.result()

    def _program(
        self, shape: Shape, name: str, arguments: Callable[[], tuple[Any, ...]]
    ) -> Callable[..., Any]:
        program = self._made.get((shape, name))
        if program is None:
            program = self._made[shape, name] = self._loaded(shape, name, arguments)
        return program

    def _loaded(
        self, shape: Shape, name: str, arguments: Callable[[], tuple[Any, ...]]
    ) -> Callable[..., Any]:
        """Return a program from its file, or compile it."""
        self._pairs.setdefault(shape, Pair(self._arch, shape, self._recompute, self._devices))
        made = self._files.program(lambda: self._compiled(shape, name, arguments()), shape, name)
        with self._counting:
            self.counters.add(made)
        return made.program

    def _compiled(self, shape: Shape, name: str, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        pair = self._pairs[shape]
        with self._tracing:
            if name == "backward" and not pair.is_traced:
                jax.eval_shape(pair.forward, *arguments[:3])  # backward repeats what it keeps
            program = self._devices.jit(getattr(pair, name), keeps=name == "forward")
            lowered = program.lower(*arguments)
        return lowered.compile()

    @property
    def shapes(self) -> list[Shape]:
        return list(self._pairs)


def _with_sharding(kept: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(kept.shape, kept.dtype, sharding=sharding)


def stacked(adapters: tuple[Adapter, ...]) -> Adapter:
    """Return the adapters of a pass as one, with an axis [S]."""
    layers = jax.tree.map(lambda *x: jnp.stack(x, 1), *(each.layers for each in adapters))
    others = [(each.head, each.value) for each in adapters]
    head, value = jax.tree.map(lambda *x: jnp.stack(x), *others)
    return Adapter(layers, head, value)
