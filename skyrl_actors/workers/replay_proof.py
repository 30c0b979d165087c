"""Check that a model's experts compute with the routes of a pass, once for each network."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.network import Network, PassInputs, Segment
from skyrl_actors.workers.routes import RoutedLayers

TOKENS = 6  # of each rank


def prove_replay(network: Network) -> None:
    """Raise ConfigError unless each layer's experts get the given indices and scores.

    Every rank of a sharded network takes part.
    """
    name, routed = type(network.module).__name__, network.routed
    if network.tower is not None:
        raise ConfigError(
            f"router_replay=true, but {name} takes images, and routes are kept by the tokens of a "
            "prompt, which are equal for different images; set router_replay=false"
        )
    if not routed.width:
        raise ConfigError(f"router_replay=true, but {name} has no routed experts to replay")
    routes = drawn_routes(routed)
    with seen_by_experts(routed) as seen:
        replayed(network, routes)
    wrong = [
        layer.name
        for number, layer in enumerate(routed.layers)
        if number >= len(seen) or not _took(*seen[number], layer.own(routes))
    ]
    if wrong:
        raise ConfigError(
            f"router_replay=true, but the routers of {name} do not take given experts "
            f"({', '.join(wrong[:3])}); set router_replay=false"
        )


def _took(indices: Tensor, scores: Tensor, given: Tensor) -> bool:
    """Return whether experts got the given indices [T, k], each with a score."""
    return (
        indices.shape == given.shape
        and torch.equal(indices.sort(-1)[0], given.sort(-1)[0])
        and bool((scores != 0).all())
    )


def drawn_routes(routed: RoutedLayers) -> Tensor:
    """Return [T, layers · k] int64, for each token and layer k different experts."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.rand(TOKENS, layer.num_experts, generator=generator).argsort(-1)[:, : layer.k]
        for layer in routed.layers
    ]
    return torch.cat(drawn, -1)


def replayed(network: Network, routes: Tensor) -> Tensor:
    """Return logprobs [T] of a few tokens that are computed by these experts."""
    size = network.sequence.size if network.sequence else 1
    start = network.sequence.stretch(TOKENS * size).start if network.sequence else 0
    tokens = torch.arange(TOKENS) % network.vocab_size
    inputs = PassInputs(
        tokens=tokens.to(network.device),
        positions=torch.arange(start, start + TOKENS, device=network.device),
        blocks=(Block(0, 1, TOKENS * size),),
        segments=(Segment(TOKENS * size, {}, 1.0),),  # of all ranks
        targets=tokens.to(network.device),
        counted=None,
        routes=(routes + 1).to(torch.int16).to(network.device),
    )
    with network.in_use(inputs.segments), torch.no_grad():
        return network.predict(inputs)[0]


@contextmanager
def seen_by_experts(routed: RoutedLayers) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect what the experts of each layer get, in the layers' order: indices, scores [T, k]."""
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        indices, scores = (each.detach().flatten(0, -2).cpu() for each in arguments[1:3])
        seen.append((indices, scores))

    hooks = [layer.experts.register_forward_pre_hook(keep) for layer in routed.layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
