"""The inputs of a pass: rows of one or many models, packed end to end."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.example import TARGETS
from skyrl_actors.messages.images import PlacedImage
from skyrl_actors.workers.activation_offload import offloading
from skyrl_actors.workers.network import Network, PassInputs, Segment
from skyrl_actors.workers.packing import Pass
from skyrl_actors.workers.pass_part import PassPart
from skyrl_actors.workers.routes import misfit
from skyrl_actors.workers.vision import Placed, VisionTower, placed, positions_of

# Of Pillow and transformers. The edge has decoded the image in the same way.
BAD_IMAGE = (OSError, ValueError, AssertionError, LookupError, InternalError)
NO_IMAGES = "this base model takes no images; send text, or choose a base with a vision tower"


def inputs_of(
    network: Network, parts: Sequence[PassPart], plan: Pass, forward_only: bool
) -> PassInputs:
    """Return the inputs of a pass. Parts that do not fit the model are refused."""
    total, stretch = plan.num_tokens + plan.padding, stretch_of(network, plan)
    tokens = np.zeros(total, np.int64)
    counted = np.zeros(total, bool)
    is_critic = parts[0].model.spec.role == "critic"
    width = max(part.num_targets for part in parts)
    targets = None if is_critic else np.zeros((total, width) if width else total, np.int64)
    for share in plan.shares:
        part = parts[share.part]
        where = part.columns.positions(share.rows)
        tokens[share.span] = part.columns.tokens[where]
        counted[share.span] = part.scored(where)
        if targets is not None:
            given = part.columns.fields[TARGETS][where]
            targets[share.span] = widened(given, width) if width else given
    return PassInputs(
        tokens=_tensor(network, tokens[stretch]),
        positions=_positions(network, parts, plan)[..., stretch].to(network.device),
        blocks=plan.blocks,
        segments=tuple(_segments(parts, plan)),
        targets=None if targets is None else _tensor(network, targets[stretch]),
        counted=None if counted.all() else _tensor(network, counted[stretch]),
        entropy_gradient=any(part.entropy_coef for part in parts) and not forward_only,
        routes=_routes(network, parts, plan, stretch),
        images=_images(network, parts, plan, stretch, forward_only),
    )


def widened(targets: np.ndarray, width: int) -> np.ndarray:
    """Return targets [n] or [n, k] as [n, width], repeating the first one.

    Top-k and top-p keep every target of a row, so a row gets no other token.
    """
    given = targets.reshape(len(targets), -1)
    more = np.broadcast_to(given[:, :1], (len(given), width - given.shape[1]))
    return np.concatenate((given, more), axis=1)


def _positions(network: Network, parts: Sequence[PassPart], plan: Pass) -> Tensor:
    """Return [T], or [3, T] if a row has images."""
    found, tower = plan.positions(), network.tower
    with_images = [] if tower is None else rows_with_images(parts, plan)
    if tower is None or not with_images:
        return found
    found = found.repeat(3, 1)
    for start, length, images in with_images:
        grids = [(place - start, image.grid) for place, image in images]
        found[:, start : start + length] = torch.from_numpy(
            positions_of(length, grids, tower.merge)
        )
    return found


def _images(
    network: Network, parts: Sequence[PassPart], plan: Pass, stretch: slice, forward_only: bool
) -> Placed | None:
    tower = network.tower
    if tower is None:
        return None
    features_of = tower.trained_features if parts[0].model.trains_tower else tower.features
    offloads = network.activations == "offload"
    with (
        torch.set_grad_enabled(not forward_only),
        offloading(network.device) if offloads else nullcontext(),
    ):
        features = [
            (place, features_of(image))
            for start, length, images in rows_with_images(parts, plan)
            if start < stretch.stop and start + length > stretch.start
            for place, image in images
        ]
        return placed(features, stretch.start, stretch.stop - stretch.start)


def refuse_images(network: Network, parts: Sequence[PassPart]) -> None:
    """Refuse parts whose images the model cannot take, before the first pass.

    All ranks that share rows come to the same result, so none waits for another in a pass.
    """
    for part in parts:
        if part.columns.images is not None:
            part.refused = _fault_of(part, network.tower) if network.tower else NO_IMAGES


def _fault_of(part: PassPart, tower: VisionTower) -> str | None:
    """Return what is wrong with the first bad image of a part."""
    at = 0

    def images() -> Iterator[PlacedImage]:
        nonlocal at
        for at in part.rows:
            yield from part.columns.images_of(at)

    try:
        tower.check(images(), part.model.trains_tower)
    except BAD_IMAGE as error:
        return f"datum {at}: its image cannot be computed: {error}"
    return None


def _routes(
    network: Network, parts: Sequence[PassPart], plan: Pass, stretch: slice
) -> Tensor | None:
    """Return the routes of this rank's tokens, 0 for rows without; None if no row has any."""
    routed, found = network.routed, None
    for share in plan.shares:
        part = parts[share.part]
        own = part.columns.routes
        if own is None:
            continue
        if fault := misfit(own, routed):
            part.refused = fault
            continue
        if found is None:
            found = np.zeros((plan.num_tokens + plan.padding, routed.width), np.int16)
        found[share.span] = own[part.columns.positions(share.rows)]
    return None if found is None else _tensor(network, found[stretch])


def rows_with_images(
    parts: Sequence[PassPart], plan: Pass
) -> list[tuple[int, int, list[tuple[int, PlacedImage]]]]:
    """Return the rows with images: place in the pass, length, and the images with their places."""
    found: list[tuple[int, int, list[tuple[int, PlacedImage]]]] = []
    for share in plan.shares:
        columns, place = parts[share.part].columns, share.start
        if parts[share.part].refused is not None:
            continue
        for row in share.rows:
            begin, length = int(columns.offsets[row]), int(columns.lengths[row])
            images = [(place + image.start - begin, image) for image in columns.images_of(row)]
            if images:
                found.append((place, length, images))
            place += length
    return found


def _segments(parts: Sequence[PassPart], plan: Pass) -> list[Segment]:
    """Return each model's tokens. Padding belongs to the last segment."""
    if not plan.shares:
        return [parts[0].model.segment(plan.num_tokens + plan.padding)]
    return [
        parts[share.part].model.segment(
            share.num_tokens + (plan.padding if share is plan.shares[-1] else 0),
            parts[share.part].processing,
        )
        for share in plan.shares
    ]


def stretch_of(network: Network, plan: Pass) -> slice:
    """Return the slice of this rank's tokens."""
    total = plan.num_tokens + plan.padding
    return network.sequence.stretch(total) if network.sequence else slice(0, total)


def _tensor(network: Network, array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(network.device)
