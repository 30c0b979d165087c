"""Snapshots: copy the state of a model at one moment, and write it later.

Where every rank holds the whole state, rank 0 writes weights and moments. Their pending gradients
are not yet reduced. So each rank writes its own share, and with the same number of ranks, each rank
reads its own share again.

Where the state is sharded, each rank copies and writes the pieces that it holds: nothing is
gathered. Any number of ranks and any strategy reads either form. Sharded weights are copied only
between steps. Nothing is lost, because the operations after a snapshot are replayed.

There is no generator state to save. No random numbers are drawn after a model's creation: its seed
is in the spec, and samples carry their own seeds.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.workers.checkpoint import moments_in
from skyrl_actors.workers.models import TrainedModel
from skyrl_actors.workers.sharded_files import Piece, ShardedFiles, write_pieces
from skyrl_actors.workers.state import MOMENTS, Kind, TrainState, is_whole, on_host
from skyrl_actors.workers.tensor_files import Joined, Shape, TensorFiles

STATE_FILE = "state.safetensors"
SPEC_FILE = "model_spec.json"


@dataclass
class WholeCopy:
    """A copy of a model's whole state, in host memory."""

    spec: ModelSpec
    # weights [P], and after the first step exp_avg [P], exp_avg_sq [P] and step []
    tensors: dict[str, Tensor]
    gradients: Tensor | None  # [P], None when nothing is pending

    def write(self, folder: Path, rank: int, world_size: int) -> None:
        """Write this rank's part of the copy."""
        if rank == 0:
            save_file(self.tensors, folder / STATE_FILE)
            _write_spec(self.spec, folder)
        if self.gradients is not None:
            save_file(
                {"gradients": self.gradients},
                folder / f"gradients-{rank}-of-{world_size}.safetensors",
            )


@dataclass
class ShardCopy:
    """A copy of one rank's pieces of a model's state, in host memory."""

    spec: ModelSpec
    pieces: dict[str, list[Piece]]  # by kind
    shapes: dict[str, Shape]  # of the whole tensors
    num_steps: int

    def write(self, folder: Path, rank: int, world_size: int) -> None:
        """Write this rank's pieces."""
        file = folder / f"shard-{rank}-of-{world_size}.safetensors"
        write_pieces(file, self.pieces, self.shapes, {"num_steps": self.num_steps})
        if rank == 0:
            _write_spec(self.spec, folder)


StateCopy = WholeCopy | ShardCopy


def copy_of(model: TrainedModel) -> StateCopy:
    """Copy the state of a model, or this rank's pieces of it. Not collective.

    Raises InternalError when gradients of sharded weights are pending.
    """
    state = model.state
    if is_whole(state):
        return WholeCopy(model.spec, state.copied(), state.copied_gradients())
    if state.pending:
        raise InternalError(
            f"{model.spec.model_id} is copied between steps only: its pending gradients are sharded"
        )
    kinds: tuple[Kind, ...] = ("weights", *(MOMENTS if state.num_steps else ()))
    pieces: dict[str, list[Piece]] = {
        kind: [(name, start, on_host(piece)) for name, start, piece in state.own_pieces(kind)]
        for kind in kinds
    }
    return ShardCopy(model.spec, pieces, dict(state.shapes), state.num_steps)


class UnwrittenCopies:
    """The copies of a rank that wait to be written, each by its handle."""

    def __init__(self) -> None:
        self._copies: dict[int, StateCopy] = {}
        self._next = 0

    def add(self, copy: StateCopy) -> int:
        """Keep a copy and return its handle, which is never reused."""
        self._next += 1
        self._copies[self._next] = copy
        return self._next

    def take(self, handle: int) -> StateCopy:
        """Remove and return a copy. Called by the thread that writes it."""
        return self._copies.pop(handle)

    def forget(self, model_id: str) -> None:
        """Drop the copies of a model."""
        for handle, copy in list(self._copies.items()):  # another thread can remove one
            if copy.spec.model_id == model_id:
                self._copies.pop(handle, None)


def load(state: TrainState, folder: Path, rank: int, world_size: int) -> None:
    """Load a snapshot, under any number of ranks and any strategy.

    Pending gradients require that every rank holds its model whole.
    """
    if shards := sorted(folder.glob("shard-*.safetensors")):
        with ShardedFiles(shards) as files:
            state.load(files.vector("weights"))
            steps = int(files.facts["num_steps"])
            state.load_moments({kind: files.vector(kind) for kind in MOMENTS if steps}, steps)
        return
    shapes = dict(state.shapes)
    with TensorFiles(folder / STATE_FILE) as files:
        state.load(Joined(files, "weights", shapes))
        state.load_moments(*(moments_in(files, shapes) if "exp_avg" in files.shapes else ({}, 0)))
    shares = sorted(folder.glob("gradients-*.safetensors"))
    if not shares:
        return
    if not is_whole(state):
        raise InternalError(
            "this snapshot has pending gradients of whole weights; "
            "restore it with the strategy replica"
        )
    own = folder / f"gradients-{rank}-of-{world_size}.safetensors"
    if shares[0].name.endswith(f"-of-{world_size}.safetensors"):
        mine = [own] if own.exists() else []
    else:  # under another number of ranks, rank 0 takes the sum
        mine = shares if rank == 0 else []
    state.begin()
    state.pending = True  # also without a share, because other ranks wait in the next step
    with torch.no_grad():
        for share in mine:
            state.add_gradients(load_file(share)["gradients"])


def _write_spec(spec: ModelSpec, folder: Path) -> None:
    (folder / SPEC_FILE).write_text(json.dumps(asdict(spec), indent=2))
