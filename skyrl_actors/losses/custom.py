"""A loss that the user defines, traced on the client and run by the workers for each datum.

It needs `http.sdk.custom_loss_server_side`. `loss_id` is the answer of `create_custom_loss`. The
loss reads p and the loss_fn_inputs that it names. `elementwise_loss` contains the whole loss of a
datum at its first token.
"""

from collections.abc import Mapping

from skyrl_actors.losses.custom_graph import graph_of
from skyrl_actors.losses.loss import Array, LossTerms, Ops, loss


@loss("custom", role="policy", required=(), many_targets=True, any_inputs=True)
def custom(
    ops: Ops, logprobs: Array, inputs: Mapping[str, Array], *, loss_id: str = ""
) -> LossTerms:
    """Run the user's graph on each datum. Raises InvalidRequest for an invalid id."""
    graph = graph_of(loss_id)
    return LossTerms(*ops.each_row(graph, logprobs, {name: inputs[name] for name in graph.inputs}))
