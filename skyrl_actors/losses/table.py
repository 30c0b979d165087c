"""The losses as a table for people: `python -m skyrl_actors.losses.table > docs/losses.md`."""

import inspect

from skyrl_actors.losses.base import REGISTRY, Loss

HEAD = """# Losses

One value a token; the total is the **sum** over tokens and datums. p: logprobs of `target_tokens` now, at temperature 1; q: the input
`logprobs`, those of who sampled; A: `advantages`; V: values. Options go into `loss_fn_config`; an unknown one is refused. `stable_reinforce`
is refused: its objective is not public; `importance_sampling` is the nearest that is served.

Every loss with advantages takes a divergence from a reference policy: with `kl_coef` above 0, the inputs `reference_logprobs` and `weights` are
needed and Σ weights·kl_coef·k(p − p_ref) is added, where k(d) is d²/2 (`kl_estimator` k2) or exp(−d) − 1 + d (k3, the default; Schulman,
2020). With `entropy_coef` the policy's entropy at counted tokens is taken off, unweighted.

| loss | for a | value and source | inputs | options |
|---|---|---|---|---|
"""


def markdown() -> str:
    return HEAD + "".join(_row(REGISTRY[name]) for name in sorted(REGISTRY))


def _row(entry: Loss) -> str:
    module = inspect.getmodule(entry.function)
    said = " ".join((inspect.getdoc(module) or "").split())
    inputs = [f"`{name}`" for name in (*(["target_tokens"] if entry.role == "policy" else []), *entry.required)]
    if entry.many_targets:
        inputs[0] += " (N,) or (N, K)"
    if entry.any_inputs:
        inputs.append("any")
    inputs += [f"`{name}` (else {default:g})" for name, default in entry.optional.items()]
    options = [
        f"`{name}` {default or '(text)' if isinstance(default, str) else f'{default:g}'}"
        for name, default in entry.options.items()
    ]
    return f"| `{entry.name}` | {entry.role} | {said} | {', '.join(inputs)} | {', '.join(options) or 'none'} |\n"


if __name__ == "__main__":
    print(markdown(), end="")
