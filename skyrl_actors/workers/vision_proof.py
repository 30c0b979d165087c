"""Check that packed rows with images are computed as transformers does alone, once for a base.

Placeholders, positions with three axes and the features of the tower meet in one packed axis. An
error in any of them would train on wrong numbers without an error. So a row of text and two rows
with an image are computed together, and each by transformers' own forward from the pixels. The base
is refused by name unless log-probabilities agree, and an image has no gradient by those of other
rows. It may move them by rounding: which tokens an expert gets decides how a library divides its
product.
"""

import io
import logging
import time
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.images import PlacedImage
from skyrl_actors.workers.isolation import ALLOWED as ISOLATED
from skyrl_actors.workers.isolation import (
    BUILT_OTHERWISE,
    embeddings,
    own_attention,
    past_the_engine,
)
from skyrl_actors.workers.network import Network, PassInputs, Segment
from skyrl_actors.workers.packing import plan_passes
from skyrl_actors.workers.vision import Features, VisionTower, placed, positions_of

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # one line at the start of a rank

# Mean |Δ logprob| of a row in nats. Correct models of random weights: 2e-7 in float32.
ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.2}
TEXT = 3  # tokens before an image, and behind it
# Of the images, in pixels; their processor makes small ones larger.
UPRIGHT, LYING = (96, 64), (64, 96)
COUNTED = ((1, 1), (30, 500), (801, 333))  # height and width, to compare counts of tokens


def prove_images(network: Network, dtype: torch.dtype) -> None:
    """Raise ConfigError unless rows with images are computed as by transformers.

    Does nothing for a base without a vision tower.
    """
    tower = network.tower
    if tower is None:
        return
    name, started = type(network.module).__name__, time.perf_counter()
    allowed = ALLOWED[dtype]
    try:
        _check_counts(tower)
        with torch.no_grad(), past_the_engine(network):
            difference, moved, leak = _differences(network, tower)
    except BUILT_OTHERWISE as error:
        raise _refused(name, f"a pass raises {type(error).__name__}: {error}") from error
    finally:
        tower.forget()
    if not difference <= allowed:
        raise _refused(name, f"logprobs differ by {difference:.2g} nats, {allowed:g} is allowed")
    if not moved <= ISOLATED[dtype].moved:
        raise _refused(name, f"an image moves logprobs of another row by {moved:.2g} nats")
    if not leak == 0:
        raise _refused(name, f"logprobs have a gradient of {leak:.2g} by another row's image")
    took = time.perf_counter() - started
    log.info("%s computes packed rows with images (checked in %.2f s)", name, took)


def _check_counts(tower: VisionTower) -> None:
    """Raise ValueError if the edge would count other tokens than the processor makes."""
    random, form = np.random.default_rng(0), tower.pixels.form
    own = form and (form.patch, form.merge, form.least, form.most)
    if form is None or own != tower.pixels.settings:
        raise ValueError(f"the processor has {tower.pixels.settings}, and its file {own}")
    for height, width in COUNTED:
        _, grid = tower.pixels.of(_image(random, (height, width)))
        if form.grid(width, height) != grid:
            raise ValueError(f"an image of {width} x {height} pixels is counted otherwise")


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be trained here: packed rows with images differ from each row alone by "
        f"transformers ({why}). Choose a base model of another family; docs/reference/models.md "
        "lists what can be trained"
    )


def _differences(network: Network, tower: VisionTower) -> tuple[float, float, float]:
    """Return the largest mean |Δ logprob| of a row, and what another row's image does to a row.

    That is the largest mean |Δ logprob|, and the largest |gradient| by the image's features.
    """
    rows = _Rows(network, tower)
    (packed, leak), (other, _) = rows.packed("first"), rows.packed("second")
    differences = [(packed[span] - rows.alone(i)).abs().mean() for i, span in enumerate(rows.spans)]
    # The second batch has another image in the last row.
    moved = [(packed - other)[span].abs().mean() for span in rows.spans[:-1]]
    if float((packed - other)[rows.spans[-1]].abs().max()) == 0:
        raise ValueError("the pixels of an image change nothing")
    return float(torch.stack(differences).max()), float(torch.stack(moved).max()), leak


class _Rows:
    """A row of text, and two rows with an image each."""

    def __init__(self, network: Network, tower: VisionTower):
        token = int(network.module.config.image_token_id)
        random = np.random.default_rng(0)
        # Upright and lying images of equal lengths, so their rows share a block.
        contents = [_image(random, size) for size in (UPRIGHT, LYING, LYING)]
        grids = [tower.pixels.of(content)[1] for content in contents]
        counts = [int(np.prod(grid)) // tower.merge**2 for grid in grids]
        lengths = [TEXT, *(2 * TEXT + count for count in counts[:2])]
        ends = np.cumsum(lengths).tolist()
        self.spans = [slice(end - n, end) for n, end in zip(lengths, ends, strict=True)]
        self.tokens, self.targets = (
            torch.from_numpy(random.integers(0, network.vocab_size, ends[-1])) for _ in range(2)
        )
        self.tokens[self.tokens == token] = 0
        self._network, self._tower, self._token = network, tower, token

        def placed_at(row: int, which: int) -> PlacedImage:
            place = self.spans[row].start + TEXT
            self.tokens[place : place + counts[which]] = token
            return PlacedImage(
                digest=str(which),
                content=contents[which],
                grid=grids[which],
                start=place,
                num_tokens=counts[which],
            )

        first = placed_at(1, 0)
        self._images = {
            "first": [first, placed_at(2, 1)],
            "second": [first, placed_at(2, 2)],
        }

    def packed(self, batch: str) -> tuple[Tensor, float]:
        """Compute all rows in one pass.

        Returns their logprobs [T], and the largest |gradient| of those of all rows but the last, by
        the features of the last row's image.
        """
        network, total = self._network, len(self.tokens)
        lengths = np.asarray([span.stop - span.start for span in self.spans])
        (plan,) = plan_passes([(range(len(lengths)), lengths)], total)
        group = network.sequence
        plan = plan.padded_to(group.size if group else 1)
        total += plan.padding
        stretch = group.stretch(total) if group else slice(0, total)
        positions = plan.positions().repeat(3, 1)
        images = self._images[batch]
        for image, span in zip(images, self.spans[1:], strict=True):
            grids = [(TEXT, image.grid)]
            own = positions_of(span.stop - span.start, grids, self._tower.merge)
            positions[:, span] = torch.from_numpy(own)
        found = [(image.start, _leaves(self._tower.features(image))) for image in images]
        segments = (Segment(total, {}, 1.0),)

        def mine(values: Tensor) -> Tensor:
            more = total - values.shape[-1]
            return torch.nn.functional.pad(values, (0, more))[..., stretch].to(network.device)

        with torch.enable_grad():
            joined = placed(found, stretch.start, stretch.stop - stretch.start)
        inputs = PassInputs(
            tokens=mine(self.tokens),
            positions=positions[..., stretch].to(network.device),
            blocks=plan.blocks,
            segments=segments,
            targets=mine(self.targets),
            counted=None,
            images=joined,
        )
        last = found[-1][1]
        before = torch.zeros(len(self.tokens))
        before[: self.spans[-1].start] = 1
        # Every rank needs a leaf, also one without tokens of an image.
        with network.in_use(segments), embeddings(network) as seen, torch.enable_grad():
            logprobs, _ = network.predict(inputs)
            gradients = torch.autograd.grad(
                (logprobs * mine(before)).sum(),
                (*seen, last.embedded, *last.of_layers),
                allow_unused=True,
            )[len(seen) :]
        leak = max((float(x.abs().max()) for x in gradients if x is not None), default=0.0)
        logprobs = logprobs.detach()
        return (group.gathered(logprobs) if group else logprobs)[: plan.num_tokens].float(), leak

    def alone(self, row: int) -> Tensor:
        """Return the logprobs of one row by transformers' own forward, from the pixels."""
        network, span = self._network, self.spans[row]
        tokens = self.tokens[span].to(network.device)
        given: dict[str, Any] = {}
        if row:
            image = self._images["first"][row - 1]
            values, _ = self._tower.pixels.of(image.content)
            given = {
                "pixel_values": torch.from_numpy(values).to(network.device),
                "image_grid_thw": torch.tensor([image.grid], device=network.device),
                "mm_token_type_ids": (tokens == self._token).int()[None],
            }

        def logits() -> Tensor:
            return network.module(input_ids=tokens[None], use_cache=False, **given).logits[0]

        with own_attention(network), network.in_use(()):
            found = network.entry(logits).float().log_softmax(-1)
        return found.gather(1, self.targets[span].to(network.device)[:, None])[:, 0]


def _leaves(features: Features) -> Features:
    """Return the features as leaves that require a gradient."""
    return Features(
        features.embedded.detach().requires_grad_(),
        tuple(x.detach().requires_grad_() for x in features.of_layers),
    )


def _image(random: np.random.Generator, size: tuple[int, int]) -> bytes:
    """Return a PNG of noise."""
    content = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)).save(content, "PNG")
    return content.getvalue()
