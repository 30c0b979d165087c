"""The registry of losses: names, options, inputs and functions.

The API validates requests against the registry, and workers compute losses from it. A loss is a
pure function of arrays and of `Ops`, a set of array functions. It therefore runs with torch and
with other array libraries. It returns one value for each token. The total is their SUM: clients
set weights for a mean.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from skyrl_actors.losses import kl, processing
from skyrl_actors.losses.custom_graph import Graph
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import TARGETS
from skyrl_actors.messages.model import LossCall, Role

ENTROPY_COEF = "entropy_coef"
"""Option of every loss with advantages: the factor of the entropy that is subtracted from the loss.

The entropy of the policy is summed over counted tokens.
"""

Array = Any  # [T] float32 or float64, of the library that `Ops` wraps


class Ops(Protocol):
    """The array functions that losses use."""

    def exp(self, x: Array) -> Array: ...
    def clip(self, x: Array, low: float, high: float) -> Array: ...
    def clip_around(self, x: Array, centre: Array, radius: float) -> Array: ...
    def minimum(self, x: Array, y: Array) -> Array: ...
    def maximum(self, x: Array, y: Array) -> Array: ...
    def detach(self, x: Array) -> Array: ...
    def where(self, condition: Array, x: Array, y: Array) -> Array: ...
    def count(self, condition: Array, like: Array) -> Array: ...
    def row_mean(self, x: Array, mask: Array) -> Array:
        """Return [T]: at each position, the mean of x over its row where mask is not 0.

        The mean is 0 for a row whose mask is 0 everywhere.
        """
        ...

    def each_row(
        self, graph: Graph, predicted: Array, inputs: Mapping[str, Array]
    ) -> tuple[Array, dict[str, Array]]:
        """Run an uploaded loss on each row.

        Returns:
            The loss of each row at the first position of the row, and the sums of the metrics.
        """
        ...


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The output of a loss."""

    elementwise: Array  # [T]
    sums: dict[str, Array]  # scalars that add up over rows, ranks and chunks


def log_ratio(ops: Ops, logprobs: Array, sampled: Array, limit: float) -> Array:
    """Return p − q, clipped to −limit … limit unless the limit is 0.

    The limit keeps exp finite. A token beyond it has no gradient through its ratio.
    """
    difference = logprobs - sampled
    return ops.clip(difference, -limit, limit) if limit else difference


LossFunction = Callable[..., LossTerms]  # (ops, predicted [T], inputs by name, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A registered loss."""

    name: str
    role: Role
    required: tuple[str, ...]
    optional: Mapping[str, float]  # inputs that may be absent, with their default values
    options: Mapping[str, float | str]
    function: LossFunction
    many_targets: bool = False  # also takes inputs of shape [T, K]
    any_inputs: bool = False  # also takes inputs of other names

    def checked(self, config: Mapping[str, Any]) -> LossCall:
        """Return a call with a value for every option.

        Raises:
            InvalidRequest: An option is unknown, or its value cannot be used.
        """
        for key, value in config.items():
            if key not in self.options:
                allowed = ", ".join(self.options) or "none"
                raise InvalidRequest(
                    f"loss {self.name} has no option {key!r}; its options: {allowed}"
                )
            if isinstance(self.options[key], str):
                if not isinstance(value, str):
                    raise InvalidRequest(
                        f"loss {self.name}: option {key} is {value!r}; it must be a string"
                    )
            elif (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
            ):
                raise InvalidRequest(
                    f"loss {self.name}: option {key} is {value!r}; it must be a finite number"
                )
        given = {
            key: value if isinstance(value, str) else float(value) for key, value in config.items()
        }
        whole = {**self.options, **given}
        _check_ranges(self.name, whole)
        return LossCall(self.name, whole)

    def terms(
        self,
        ops: Ops,
        predicted: Array,
        inputs: Mapping[str, Array],
        config: Mapping[str, float | str],
    ) -> LossTerms:
        """Compute the loss of each token, without the entropy term.

        The entropy needs all logits. The worker that has them subtracts the term.
        """
        own = {
            key: value
            for key, value in config.items()
            if key != ENTROPY_COEF and key not in kl.OPTIONS and key not in processing.OPTIONS
        }
        found = self.function(ops, predicted, inputs, **own)
        coef = float(config.get(kl.KL_COEF, 0.0))
        if not coef:
            return found
        weights = inputs["weights"]
        # Where the weight is 0, use the predicted value as reference. A reference of 0 would
        # overflow exp there, and 0 · inf is NaN.
        reference = ops.where(weights != 0, inputs[kl.REFERENCE], ops.detach(predicted))
        divergence = kl.estimate(ops, predicted, reference, str(config[kl.KL_ESTIMATOR])) * weights
        sums = {**found.sums, "weighted_kl:sum": ops.detach(divergence).sum()}
        return LossTerms(found.elementwise + coef * divergence, sums)


def _check_ranges(name: str, options: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for an option whose value has no meaning."""
    low, high = options.get("clip_low_threshold", 0.0), options.get("clip_high_threshold", math.inf)
    if low > high:
        raise InvalidRequest(
            f"loss {name}: clip_low_threshold {low:g} is above clip_high_threshold {high:g}"
        )
    if (limit := options.get("log_ratio_limit", 0.0)) < 0:
        raise InvalidRequest(
            f"loss {name}: log_ratio_limit is {limit:g}; it must be above 0, or 0 for no limit"
        )
    dual = options.get("dual_clip", 0.0)
    if dual != 0 and dual <= 1:
        raise InvalidRequest(
            f"loss {name}: dual_clip is {dual:g}; it must be above 1, or 0 for no bound"
        )


REGISTRY: dict[str, Loss] = {}


def loss(
    name: str,
    *,
    role: Role,
    required: tuple[str, ...],
    optional: Mapping[str, float] | None = None,
    many_targets: bool = False,
    any_inputs: bool = False,
) -> Callable[[LossFunction], LossFunction]:
    """Register a loss.

    Its options are the keyword-only parameters of the function, with their defaults.
    """

    def register(function: LossFunction) -> LossFunction:
        parameters = inspect.signature(function).parameters.values()
        given = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        options = {
            key: value if isinstance(value, str) else float(value) for key, value in given.items()
        }
        if "advantages" in required:
            options |= {ENTROPY_COEF: 0.0, **kl.OPTIONS}
        if role == "policy":
            options |= processing.OPTIONS
        REGISTRY[name] = Loss(
            name=name,
            role=role,
            required=required,
            optional=dict(optional or {}),
            options=options,
            function=function,
            many_targets=many_targets,
            any_inputs=any_inputs,
        )
        return function

    return register


def find(name: str) -> Loss:
    """Return a registered loss.

    Raises:
        InvalidRequest: There is no loss with this name.
    """
    if name not in REGISTRY:
        hint = " (its objective is not public; importance_sampling is the closest available)" * (
            name == "stable_reinforce"
        )
        raise InvalidRequest(
            f"unknown loss {name!r}{hint}; available: {', '.join(sorted(REGISTRY))}"
        )
    return REGISTRY[name]


def check_inputs(
    entry: Loss, call: LossCall, role: Role, columns: Columns, forward_only: bool
) -> None:
    """Check that a loss fits a model and its inputs.

    A forward pass on a critic needs neither values nor returns, because it only computes values.

    Raises:
        InvalidRequest: The loss is for another role, or an input is missing, unknown or not used.
    """
    if entry.role != role:
        allowed = ", ".join(sorted(e.name for e in REGISTRY.values() if e.role == role))
        raise InvalidRequest(
            f"loss {entry.name} is for a {entry.role}, this model is a {role}; use {allowed}"
        )
    if columns.widths is not None and not entry.many_targets:
        able = ", ".join(sorted(e.name for e in REGISTRY.values() if e.many_targets))
        raise InvalidRequest(
            f"loss {entry.name} takes inputs of one value for each token; "
            f"only {able} takes the shape (N, K)"
        )
    if entry.role == "policy":
        processing.check(entry.name, call.config, columns.widths is not None)
    present = set(columns.fields)
    if role == "critic" and forward_only and not present & set(entry.required):
        return
    needed = [*([TARGETS] if role == "policy" else []), *entry.required]
    missing = [name for name in needed if name not in present]
    if missing:
        raise InvalidRequest(
            f"loss {entry.name} needs loss_fn_inputs {', '.join(needed)}; "
            f"missing: {', '.join(missing)}"
        )
    if entry.any_inputs:
        return
    allowed_inputs = {TARGETS, *entry.required, *entry.optional}
    if kl.KL_COEF in entry.options:
        kl.check(entry.name, call.config, present)
        allowed_inputs.add(kl.REFERENCE)
    if unknown := sorted(present - allowed_inputs):
        raise InvalidRequest(
            f"loss {entry.name} does not use {', '.join(unknown)}; "
            f"its inputs: {', '.join(sorted(allowed_inputs))}"
        )
