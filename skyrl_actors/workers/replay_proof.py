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
    """Raise ConfigError unless each layer's experts get the given indices.

    Every rank of a sharded network takes part.
    """
    name, routed = type(network.module).__name__, network.routed
    if not routed.width:
        raise ConfigError(f"router_replay=true, but {name} has no routed experts to replay")
    routes = _drawn(routed)
    with _seen_by_experts(routed) as seen:
        _pass(network, (routes + 1).to(torch.int16))
    wrong = [
        layer.name
        for number, layer in enumerate(routed.layers)
        if number >= len(seen)
        or seen[number].shape != layer.own(routes).shape
        or not torch.equal(seen[number].sort(-1)[0], layer.own(routes).sort(-1)[0])
    ]
    if wrong:
        raise ConfigError(
            f"router_replay=true, but the routers of {name} do not take given experts "
            f"({', '.join(wrong[:3])}); set router_replay=false"
        )


def _drawn(routed: RoutedLayers) -> Tensor:
    """Return [T, layers · k] int64, for each token and layer k different experts."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.rand(TOKENS, layer.num_experts, generator=generator).argsort(-1)[:, : layer.k]
        for layer in routed.layers
    ]
    return torch.cat(drawn, -1)


def _pass(network: Network, routes: Tensor) -> None:
    size = network.sequence.size if network.sequence else 1
    start = network.sequence.stretch(TOKENS * size).start if network.sequence else 0
    tokens = torch.arange(TOKENS) % network.vocab_size
    inputs = PassInputs(
        tokens=tokens.to(network.device),
        positions=torch.arange(start, start + TOKENS, device=network.device),
        blocks=(Block(0, 1, TOKENS * size),),
        segments=(Segment(TOKENS, {}, 1.0),),
        targets=tokens.to(network.device),
        counted=None,
        routes=routes.to(network.device),
    )
    with network.in_use(inputs.segments), torch.no_grad():
        network.predict(inputs)


@contextmanager
def _seen_by_experts(routed: RoutedLayers) -> Iterator[list[Tensor]]:
    """Collect the indices [T, k] that the experts of each layer get, in the layers' order."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        seen.append(arguments[1].detach().flatten(0, -2).cpu())

    hooks = [layer.experts.register_forward_pre_hook(keep) for layer in routed.layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
