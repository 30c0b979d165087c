"""A loss of the user's own, traced on the client and run here for each datum, where `http.sdk.custom_loss_server_side` is set; `loss_id` is
what `create_custom_loss` answered. It reads p and the loss_fn_inputs that it names. The whole of a datum's loss stands at its
first token in `elementwise_loss`."""

from collections.abc import Mapping

from skyrl_actors.losses.base import Array, LossTerms, Ops, loss
from skyrl_actors.losses.custom_graph import graph_of


@loss("custom", role="policy", required=(), many_targets=True, any_inputs=True)
def custom(ops: Ops, logprobs: Array, inputs: Mapping[str, Array], *, loss_id: str = "") -> LossTerms:
    graph = graph_of(loss_id)
    return LossTerms(*ops.each_row(graph, logprobs, {name: inputs[name] for name in graph.inputs}))
