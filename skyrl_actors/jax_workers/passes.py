"""One pass of a JAX network: its inputs as arrays, its programs, and its gradients as tensors."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import torch
from torch import Tensor

from skyrl_actors.jax_workers.architecture import Architecture
from skyrl_actors.jax_workers.arrays import Devices, tensor_of
from skyrl_actors.jax_workers.decoder import KINDS, Rows
from skyrl_actors.jax_workers.head import Asked, Scored
from skyrl_actors.jax_workers.low_rank import Slots
from skyrl_actors.jax_workers.plans import Layout, layout_of, rank_of, slots_of
from skyrl_actors.jax_workers.programs import Adapter, Base, Batch, Programs, Shape
from skyrl_actors.jax_workers.weights import (
    NORM,
    Form,
    Names,
    adapter_gradients,
    gradients_of,
    kinds_in,
    outer_in,
    rank_in,
)
from skyrl_actors.workers.adapter_terms import UNEMBED
from skyrl_actors.workers.network import PassInputs, Segment
from skyrl_actors.workers.pass_inputs import widened

Views = Mapping[str, Tensor]


class PassSource(Protocol):
    """What a pass gets from its network."""

    arch: Architecture
    base: Base
    devices: Devices
    names: Names
    programs: Programs
    score_uncounted: bool

    def adapter(self, form: Form, views: Views) -> Adapter: ...

    def weights(self, views: Views) -> Base: ...


class _Sources(NamedTuple):
    """The models of a pass: their tensors by slot, and the slot of each segment."""

    views: list[Views]
    slots: list[int]


class JaxPass:
    """One pass: its inputs as arrays, and its programs."""

    def __init__(self, source: PassSource, inputs: PassInputs, differentiable: bool):
        self._source, self.inputs, self.differentiable = source, inputs, differentiable
        self._models = _models_of(inputs.segments)
        self._layout = layout_of(inputs.blocks, [s.num_tokens for s in inputs.segments])
        views = self._models.views
        self._whole = NORM in views[0]
        self._names = [list(view) for view in views]
        self.tensors = [tensor for view in views for tensor in view.values()]
        self._form = self._form_of(views)
        self._shape = self._shape_of(inputs)
        self._batch = self._batch_of(inputs, self._layout)
        self._held: Any = None  # the trained arrays, from the forward to the backward pass
        self._kept: Any = None

    def _form_of(self, views: list[Views]) -> Form:
        kinds = set().union(*(kinds_in(view) for view in views))
        return Form(
            kinds=() if self._whole else tuple(kind for kind in KINDS if kind in kinds),
            head=not self._whole and any(f"{UNEMBED}.lora_A" in view for view in views),
            value=self.inputs.targets is None,
            rank=rank_of(max(1, *(rank_in(view) for view in views))),
            outer=max(outer_in(view) for view in views),
        )

    def _shape_of(self, inputs: PassInputs) -> Shape:
        targets, layout = inputs.targets, self._layout
        count = 0 if targets is None else 1 if targets.ndim == 1 else targets.size(1)
        truncates = any(
            s.processing is not None and s.processing.truncates for s in inputs.segments
        )
        return Shape(
            tokens=layout.size,
            window=layout.window,
            block=layout.block,
            slots=0
            if self._whole
            else slots_of(len(self._models.views), layout.size, self._source.arch.experts > 0),
            rank=self._form.rank,
            kinds=self._form.kinds,
            head=self._form.head,
            targets=count if count < 2 else 1 << (count - 1).bit_length(),
            entropy_gradient=inputs.entropy_gradient,
            truncates=truncates,
            outer=self._form.outer,
            replays=inputs.routes is not None,
        )

    def _batch_of(self, inputs: PassInputs, layout: Layout) -> Batch:
        size = layout.size
        tokens = np.zeros(size, np.int32)
        tokens[layout.places] = inputs.tokens.numpy()
        scale = np.zeros(max(1, self._shape.slots), np.float32)
        for slot, segment in zip(self._models.slots, inputs.segments, strict=True):
            scale[slot] = segment.scale
        of_block = np.asarray(self._models.slots, np.int32)[layout.of_block]
        made = Batch(
            tokens,  # type: ignore[arg-type]  jax takes arrays of numpy
            Rows(layout.positions, layout.numbers),  # type: ignore[arg-type]
            Slots(of_block, scale),  # type: ignore[arg-type]
            None if inputs.targets is None else self._asked(inputs, layout),
            self._routes(inputs, layout),  # type: ignore[arg-type]
        )
        return self._source.devices.given(made)

    def _routes(self, inputs: PassInputs, layout: Layout) -> np.ndarray | None:
        if inputs.routes is None:
            return None
        layers = self._source.arch.layers
        routes = np.zeros((layout.size, inputs.routes.shape[1]), np.int32)
        routes[layout.places] = inputs.routes.numpy()
        return np.ascontiguousarray(routes.reshape(layout.size, layers, -1).swapaxes(0, 1))

    def _asked(self, inputs: PassInputs, layout: Layout) -> Asked:
        assert inputs.targets is not None
        targets = np.zeros((layout.size, self._shape.targets), np.int32)
        targets[layout.places] = widened(inputs.targets.numpy(), self._shape.targets)
        temperature = np.ones(layout.size, np.float32)
        top_k, top_p = np.zeros(layout.size, np.int32), np.ones(layout.size, np.float32)
        start = 0
        for segment in inputs.segments:
            places = layout.places[start : start + segment.num_tokens]
            start += segment.num_tokens
            if segment.processing is not None:
                temperature[places] = segment.processing.temperature
                top_k[places], top_p[places] = segment.processing.top_k, segment.processing.top_p
        cut = (top_k, top_p) if self._shape.truncates else (None, None)
        return Asked(targets, temperature, *cut)  # type: ignore[arg-type]

    def _trained(self) -> Any:
        source, views = self._source, self._models.views
        if self._whole:
            return source.weights(views[0])
        adapters = [source.adapter(self._form, view) for view in views]
        empty = source.adapter(self._form, _NOTHING)
        return (*adapters, *[empty] * (self._shape.slots - len(adapters)))

    def prepare(self) -> None:
        """Compile the programs that this pass needs, and run none."""
        base = None if self._whole else self._source.base
        arguments = (base, self._trained(), self._batch)
        self._source.programs.prepare(self._shape, arguments, self._slopes(None, None))

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return logprobs and entropies, or values and None."""
        base = None if self._whole else self._source.base
        run = self._source.programs.run
        trained = self._trained()
        if self.differentiable:
            self._held = trained
            arguments = (base, trained, self._batch)
            self._source.programs.ready(self._shape, arguments, lambda: self._slopes(None, None))
            found, self._kept = run(self._shape, "forward", base, trained, self._batch)
        else:
            found = run(self._shape, "predict", base, trained, self._batch)
        counters, places = self._source.programs.counters, self._layout.places
        counters.tokens += len(places)
        counters.computed += self._layout.size
        if self.inputs.targets is None:
            return torch.from_numpy(np.asarray(found)[places]), None
        logprobs = np.asarray(found.logprobs)[places]
        shape = tuple(self.inputs.targets.shape)
        if len(shape) == 1:
            logprobs = logprobs[:, 0]
        else:
            logprobs = np.ascontiguousarray(logprobs[:, : shape[1]])
        if (
            self.inputs.counted is not None
            and not self._source.score_uncounted
            and self.differentiable
        ):
            logprobs[~self.inputs.counted.numpy()] = 0
        return torch.from_numpy(logprobs), torch.from_numpy(np.asarray(found.entropy)[places])

    def backward(self, of_found: Tensor | None, of_entropy: Tensor | None) -> list[Tensor | None]:
        """Return the gradient of each of `tensors`."""
        given = self._slopes(of_found, of_entropy)
        base = None if self._whole else self._source.base
        found = self._source.programs.run(
            self._shape, "backward", base, self._held, self._batch, self._kept, given
        )
        self._kept = self._held = None
        host = jax.tree.map(tensor_of, found)
        if self._whole:
            named = [gradients_of(host, self._source.names)]
        else:
            named = [adapter_gradients(host, i, view) for i, view in enumerate(self._models.views)]
        return [
            own.get(name) for own, names in zip(named, self._names, strict=True) for name in names
        ]

    def _slopes(self, of_found: Tensor | None, of_entropy: Tensor | None) -> Any:
        """Return the slopes of the results as arrays of the program's size."""
        layout, counted = self._layout, self.inputs.counted
        first = np.zeros((layout.size, max(1, self._shape.targets)), np.float32)
        if of_found is not None:
            given = of_found.numpy().reshape(len(layout.places), -1)
            if counted is not None:
                given = given * counted.numpy()[:, None]
            first[layout.places, : given.shape[1]] = given
        second = np.zeros(layout.size, np.float32)
        if of_entropy is not None:
            second[layout.places] = of_entropy.numpy()
        made = Scored(first, second) if self._shape.targets else first[:, 0]  # type: ignore[arg-type]
        return self._source.devices.given(made)


_NOTHING: Views = {}


def _models_of(segments: Sequence[Segment]) -> _Sources:
    found, slots = _Sources([], []), {}
    for segment in segments:
        if id(segment.views) not in slots:
            slots[id(segment.views)] = len(found.views)
            found.views.append(segment.views)
        found.slots.append(slots[id(segment.views)])
    return found


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise torch's error where JAX has no memory left, so that a pass is repeated in halves."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from None


class _Predict(torch.autograd.Function):
    """The pass as a function of the tensors of its models."""

    @staticmethod
    @memory_errors()
    def forward(ctx: Any, one: JaxPass, *tensors: Tensor) -> Any:
        ctx.one = one
        ctx.set_materialize_grads(False)
        found, entropy = one.forward()
        return found if entropy is None else (found, entropy)

    @staticmethod
    @memory_errors()
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        of_found, of_entropy = (*gradients, None)[:2]
        return None, *ctx.one.backward(of_found, of_entropy)


def predict(one: JaxPass) -> tuple[Tensor, Tensor | None]:
    """Return logprobs and entropies, or values and None, as functions of the models' tensors."""
    found: Any = _Predict.apply(one, *one.tensors)
    return found if isinstance(found, tuple) else (found, None)
