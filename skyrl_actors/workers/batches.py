"""Run the rows of several models batch by batch, each batch with passes that its models share.

A batch that does not fit into memory is repeated with half the tokens in a pass, if its gradients
can be undone.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.transport.device_memory import free_unused
from skyrl_actors.workers.interface import Refused, RowOutput, WorkerSpec
from skyrl_actors.workers.model_factory import ModelFactory, collective
from skyrl_actors.workers.models import TrainedModel, adapters_of
from skyrl_actors.workers.paging import AdapterPager
from skyrl_actors.workers.pass_inputs import refuse_images
from skyrl_actors.workers.pass_part import PassPart
from skyrl_actors.workers.passes import PassRunner, empty_pass, num_passes_of_all
from skyrl_actors.workers.state import is_whole

# Elements of hidden states: 256 tokens of the tiny model, 96 of a model of width 512.
ONE_THREAD_ELEMENTS = 50_000


class BatchRunner:
    """Compute the parts of one call on one rank."""

    def __init__(
        self,
        spec: WorkerSpec,
        device: torch.device,
        factory: ModelFactory,
        pager: AdapterPager,
    ):
        self._spec = spec
        self._device = device
        self._factory = factory
        self._pager = pager

    def run(self, parts: Sequence[PassPart], forward_only: bool) -> list[RowOutput | Refused]:
        """Run all parts and return the result of each.

        Adapters share batches. A model with its own network is a batch of its own.
        """
        started = time.perf_counter()
        together = [part for part in parts if part.model.shares_network]
        refused: dict[int, Refused] = {}
        for batch in self._fitting(together) + [
            [part] for part in parts if not part.model.shares_network
        ]:
            refused |= self._run_batch(batch, forward_only)
        seconds = time.perf_counter() - started
        return [refused.get(id(part)) or self._output(part, seconds) for part in parts]

    def _fitting(self, parts: list[PassPart]) -> list[list[PassPart]]:
        """Split the parts into batches whose adapters fit on the device at once."""
        batches: list[list[PassPart]] = []
        room = 0
        for part in parts:
            lora = part.model.spec.lora
            rank = self._spec.room_of(lora.rank) if lora else 0
            if rank > room:
                batches.append([])
                room = self._spec.adapter_room
            batches[-1].append(part)
            room -= rank
        return batches

    def _output(self, part: PassPart, seconds: float) -> RowOutput:
        field = "values" if part.model.spec.role == "critic" else "logprobs"
        # Ranks with the same rows have the same results; the first one reports them.
        reports = self._spec.rank % self._spec.ranks_of_rows == 0
        if not reports:
            part = PassPart(model=part.model, columns=part.columns, rows=(), loss=part.loss)
        values, elementwise = part.in_row_order()
        return RowOutput(
            rows=part.rows,
            field=field,
            values=values,
            elementwise=elementwise,
            sums=part.sums,
            compute_s=seconds,
        )

    def _run_batch(self, parts: list[PassPart], forward_only: bool) -> dict[int, Refused]:
        """Run the parts of a batch, which share passes.

        When memory runs out, run them again with half the budget, if all added gradients can be
        undone.
        """
        self._pager.use(adapters_of([part.model for part in parts]))
        self._factory.bind(parts[0].model)
        refuse_images(parts[0].model.network, parts)
        # Other ranks can have added the rows that this rank refuses. Then the model is rebuilt on
        # all. The ranks of one mesh refuse the same.
        same = self._spec.world_size == self._spec.mesh_ranks
        clean = {id(part): forward_only or (same and _can_put_back(part.model)) for part in parts}
        # Otherwise other ranks wait in this pass.
        alone = not self._factory.in_step(parts[0].model) and self._spec.ranks_of_rows == 1
        saved = {id(part): None if forward_only else _saved(part.model) for part in parts}
        budget, error = self._spec.microbatch_tokens, ""

        def put_back(some: list[PassPart]) -> None:
            for part in some:
                if not forward_only and clean[id(part)] and is_whole(part.model.state):
                    part.model.state.put_back(saved[id(part)])

        for _ in range(2):
            try:
                if alone:
                    self._run_passes(parts, budget, forward_only)
                else:
                    collective(
                        self._spec,
                        lambda: self._run_passes(parts, self._spec.microbatch_tokens, forward_only),
                    )
                break
            except torch.OutOfMemoryError as full:
                if not alone or not all(clean.values()):
                    raise
                error = str(full).splitlines()[0]
            put_back(parts)
            for part in parts:
                part.clear()
            budget = max(
                1, min(budget, sum(int(p.columns.lengths[list(p.rows)].sum()) for p in parts)) // 2
            )
            free_unused(self._device)
        else:
            return {id(part): Refused(_too_large(budget, error), clean=True) for part in parts}
        odd = [part for part in parts if part.refused]
        put_back(odd)
        return {
            id(part): Refused(InvalidRequest(part.refused or ""), clean[id(part)]) for part in odd
        }

    def _run_passes(self, parts: list[PassPart], budget: int, forward_only: bool) -> None:
        network = parts[0].model.network
        runner = PassRunner(network, self._device, forward_only)
        plans = network.plan([(part.rows, part.columns.lengths) for part in parts], budget)
        multiple = self._spec.sequence_parallel
        plans = [plan.padded_to(multiple) for plan in plans]
        if self._factory.in_step(parts[0].model):
            missing = num_passes_of_all(len(plans), self._device) - len(plans)
            plans += [empty_pass(multiple)] * missing
        for plan in plans:
            self._use_threads(plan.num_tokens * network.hidden_size)
            runner.run(parts, plan)
        for part in parts if not forward_only else ():
            # Also on a rank without rows of the model, because other ranks wait for it in the next
            # step.
            part.model.state.pending = True

    def _use_threads(self, num_elements: int) -> None:
        """Use one thread for small operations, which is faster than waking a second thread."""
        if self._device.type == "cpu":
            torch.set_num_threads(
                1 if num_elements < ONE_THREAD_ELEMENTS else self._spec.num_threads
            )


def _can_put_back(model: TrainedModel) -> bool:
    """Return whether gradients added by a call can be undone.

    Gradients of adapters are small and are saved before each call. Gradients of a whole model are
    not saved, but they are known to be zero when none are pending.
    """
    return is_whole(model.state) and (model.shares_network or not model.state.pending)


def _saved(model: TrainedModel) -> Any:
    return model.state.saved_gradients() if model.shares_network and is_whole(model.state) else None


def _too_large(budget: int, error: str) -> InvalidRequest:
    return InvalidRequest(
        f"out of memory in a pass of {2 * budget} tokens, and in one of {budget}: {error}. "
        "Send shorter rows, or set a lower microbatch_tokens, activations=recompute or "
        "sequence_parallel"
    )
