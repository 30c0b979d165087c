"""Generate the reference page of the losses.

Run `python -m skyrl_actors.losses.loss_reference > docs/reference/losses.md`.
"""

import inspect

from skyrl_actors.losses.loss import REGISTRY, Loss

HEAD = """# Losses

A loss computes one value for each token. The total is the **sum** over tokens and datums.

| symbol | meaning |
|---|---|
| p | current logprobs of `target_tokens`, at temperature 1 unless options say otherwise |
| q | the input `logprobs`: those at sampling time |
| A | the input `advantages` |
| V | current values |
| R | the input `returns` |

Every input has one value for each token of `model_input`. Three forms are read in the only way that
they can be read; what could be read in several ways is refused with the name of the input:

- **`weights` left out** of some datums of a request, or of all: they are 1.
- **All inputs as long as the answer**, where `target_tokens` continue the end of `model_input`:
  they belong to the last positions. The others get weight 0, and outputs have the length that was
  sent. SkyRL's PPO client sends this form.
- **Inputs of shape (N, K)** beside some of shape (N): a missing target is one of weight 0.

Options are passed in `loss_fn_config`. Unknown options are refused.

`stable_reinforce` is refused, because its objective is not public. The nearest available loss is
`importance_sampling`.

With `log_ratio_limit` c above 0, p − q is clipped to −c … c before exp, which keeps the ratio
finite. A token beyond the limit has no gradient through its ratio.

Every loss of a policy accepts the options `temperature`, `top_k` (0 or −1 for all tokens) and
`top_p`. p and the entropy are then those of the distribution that such samples come from:
softmax(logits / temperature), restricted to the `top_k` most likely tokens, and then to the fewest
most likely ones whose probabilities reach `top_p`. A target outside of these tokens keeps its own
logit, so that p is finite. Which tokens are left out has no gradient. With `processed_logprobs` of
samples as q ([how](../how-to/use_the_sdk.md)), every ratio is 1 on policy. `top_k` and `top_p` need
one target for each token.

Every loss with advantages accepts two additional terms:

- With `kl_coef` above 0, the divergence from a reference policy is added:
  Σ weights·kl_coef·k(p − p_ref). The inputs `reference_logprobs` and `weights` are then
  required. k(d) is d²/2 with `kl_estimator` k2, or exp(−d) − 1 + d with k3, the default
  (Schulman, 2020).
- With `entropy_coef`, the entropy of the policy at counted tokens is subtracted. It is not
  multiplied by `weights`.

| loss | role | formula and source | inputs | options |
|---|---|---|---|---|
"""


def markdown() -> str:
    """Return the reference page."""
    return HEAD + "".join(_row(REGISTRY[name]) for name in sorted(REGISTRY))


def _row(entry: Loss) -> str:
    module = inspect.getmodule(entry.function)
    about = " ".join((inspect.getdoc(module) or "").split())
    inputs = [
        f"`{name}`"
        for name in (*(["target_tokens"] if entry.role == "policy" else []), *entry.required)
    ]
    if entry.many_targets:
        inputs[0] += " (N,) or (N, K)"
    if entry.any_inputs:
        inputs.append("any others")
    inputs += [f"`{name}` (default {default:g})" for name, default in entry.optional.items()]
    options = [
        f"`{name}` {default or '(text)' if isinstance(default, str) else f'{default:g}'}"
        for name, default in entry.options.items()
    ]
    cells = (
        f"`{entry.name}`",
        entry.role,
        about,
        ", ".join(inputs),
        ", ".join(options) or "none",
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    print(markdown(), end="")
