"""The server under test, through the public SDK: small helpers that the checks share.

Only logprobs are visible from outside. So a step is measured by how far it moves the logprobs of
fixed rows. With an epsilon far above the gradients, Adam makes plain steps: Δθ = −α·g for a
learning rate of α·epsilon. Such steps are linear in the gradient, which makes its laws testable.
"""

import re
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types
from tinker.types import RequestErrorCategory

from tinker_conformance.checks import Failed, Skipped, expect

Values = NDArray[np.float64]
USER_ERRORS = (
    tinker.BadRequestError,
    tinker.NotFoundError,
    tinker.UnprocessableEntityError,
    tinker.RequestFailedError,
)
# The SDK itself raises the last one, for numbers that do not fit.
REFUSALS = (*USER_ERRORS, tinker.PermissionDeniedError, tinker.ConflictError, OverflowError)
# Texts of ValueErrors of the SDK: its older versions refuse what they cannot send, and report a
# refusal of the server so.
REFUSAL = re.compile(r"Error code: 4|not JSON compliant|validation errors? for [A-Z]")
EPS = 1e6  # far above any gradient
FAR = 50  # times that step: about a nat, more than any tolerance
MOVED = 0.02  # mean |Δ logprob| of the steps that are measured
START_S = 600  # for the user's commands
ALIGNED = 0.05  # relative difference of two steps along each other that is allowed at least
ROWS, ROW_TOKENS = 4, 12
PROBE_ROWS = 96  # of steps that are compared along each other
LOWEST, HIGHEST = 20, 200  # of the tokens that are sent; no vocabulary is smaller


class Server:
    """A connection to a server, and rows of tokens."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        base_model: str | None,
        tolerance: float,
        timeout_s: float,
        kill_command: str | None = None,
        start_command: str | None = None,
        second_api_key: str | None = None,
        latency_s: float | None = None,
    ):
        self.base_url, self.api_key = base_url.rstrip("/"), api_key
        self.tolerance, self.timeout_s = tolerance, timeout_s
        self.kill_command, self.start_command = kill_command, start_command
        self.second_api_key, self.latency_s = second_api_key, latency_s
        self.ask_health()  # SDKs try for minutes
        self.service = self._session()
        self.base_model = base_model or self._first_model()
        self.found_alpha: float | None = None
        self._made: list[Any] = []  # models of this session
        self._saved: list[str] = []  # paths of checkpoints
        self.drops_seeds = False
        self._starts: dict[tuple[int, int, str], str] = {}  # seed, rank, base model -> saved state

    def ask_health(self) -> None:
        answer = httpx.get(f"{self.base_url}/api/v1/healthz", timeout=10)
        if answer.status_code >= 500:
            answer.raise_for_status()

    def answers(self, within_s: float = 60.0) -> bool:
        """Return whether the server answers, after a while if it was killed."""
        ends = time.monotonic() + within_s
        while True:
            try:
                self.ask_health()
                return True
            except httpx.HTTPError:
                if time.monotonic() > ends:
                    return False
                time.sleep(1)

    def start(self) -> bool:
        """Start the server by the user's command. Return whether it answers."""
        if self.start_command is None:
            return False
        try:
            subprocess.run(self.start_command, shell=True, check=True, timeout=START_S)
        except subprocess.SubprocessError:
            return False
        return self.answers()

    def with_key(self, api_key: str) -> "Server":
        """Return another connection, as the owner of another key."""
        model, tolerance, limit = self.base_model, self.tolerance, self.timeout_s
        return Server(self.base_url, api_key, model, tolerance, limit)

    def through(self, base_url: str) -> "Server":
        """Return another connection, by the address of a proxy."""
        made = Server(base_url, self.api_key, self.base_model, self.tolerance, self.timeout_s)
        made.found_alpha, made.drops_seeds = self.found_alpha, self.drops_seeds
        made._starts = dict(self._starts)
        return made

    def _session(self) -> Any:
        return tinker.ServiceClient(base_url=self.base_url, api_key=self.api_key)

    def renew(self) -> None:
        """End the session, which frees its models, and begin another one.

        Older versions of the SDK cannot end a session. Its models are unloaded one by one.
        """
        self.close()
        if hasattr(self.service, "__exit__"):
            self.service = self._session()
        self._starts.clear()  # a server may forget a run with its session

    def saved(self, answer: Any) -> str:
        """Return the path of a save. The checkpoint is removed when the session ends."""
        self._saved.append(self.got(answer).path)
        return self._saved[-1]

    def _free(self) -> None:
        """Remove checkpoints, and models where the SDK cannot end a session."""
        for path in self._saved:
            with suppress(Exception):  # the server may be down, or have removed it
                rest = self.service.create_rest_client()
                self.got(rest.delete_checkpoint_from_tinker_path(path))
        for model in self._made if not hasattr(self.service, "__exit__") else ():
            with suppress(Exception):  # the server may be down, or may not know the call
                self._unload(self.got(model.get_info()).model_id)
        self._saved.clear()
        self._made.clear()

    def _unload(self, model_id: str) -> None:
        httpx.post(
            f"{self.base_url}/api/v1/unload_model",
            json={"model_id": model_id},
            headers={"X-API-Key": self.api_key},
            timeout=self.timeout_s,
        )

    def close(self) -> None:
        """End the session, and remove what it has left."""
        self._free()
        with suppress(Exception):  # older versions have no end, and the server may be down
            self.service.__exit__(None, None, None)

    def _first_model(self) -> str:
        names = [m.model_name for m in self.service.get_server_capabilities().supported_models]
        if not names or not names[0]:
            raise Failed("get_server_capabilities lists no model; use --model")
        return names[0]

    def got(self, answer: Any) -> Any:
        """Return the result of a call, which is a future in some versions of the SDK."""
        return answer.result(timeout=self.timeout_s) if hasattr(answer, "result") else answer

    def model(self, seed: int = 1, rank: int = 8, base_model: str | None = None) -> Any:
        """Create an adapter. Two of one seed have equal weights.

        Where the server drops seeds, which one check reports, all but the first are created from a
        saved state of the first, so that the other checks can compare two runs.
        """
        start = seed, rank, base_model or self.base_model
        if self.drops_seeds and start in self._starts:
            make = self.service.create_training_client_from_state
            self._made.append(self.got(make(self._starts[start])))
            return self._made[-1]
        create = self.service.create_lora_training_client
        self._made.append(self.got(create(start[2], rank=rank, seed=seed)))
        if self.drops_seeds:
            saving = self._made[-1].save_state(f"conformance-start-{seed}-{rank}")
            self._starts[start] = self.saved(saving)
        return self._made[-1]

    def _check_is_refusal(self, error: Exception, what: str) -> None:
        """Raise Failed if a request failed by a fault of the server."""
        if getattr(error, "category", None) == RequestErrorCategory.Server:
            raise Failed(f"{what} fails in the server: {error}"[:300]) from None

    def refused(self, call: Callable[[], Any], what: str) -> str:
        """Return the message of a refusal. Raises Failed if there is none, or the server breaks.

        A call that the SDK itself refuses never reaches the server, and counts as refused.
        """
        try:
            self.got(call())
        except REFUSALS as error:
            self._check_is_refusal(error, what)
            return str(error)
        except Exception as error:
            if isinstance(error, ValueError) and REFUSAL.search(str(error)):
                return str(error)
            raise Failed(f"{what}: {type(error).__name__}: {error}"[:300]) from None
        raise Failed(f"{what} was accepted")

    def offered(self, call: Callable[[], Any], what: str) -> Any:
        """Return a result. Raises Skipped if the server refuses the call as unknown."""
        try:
            return self.got(call())
        except (*USER_ERRORS, ValueError) as e:
            if isinstance(e, ValueError) and not REFUSAL.search(str(e)):
                raise
            self._check_is_refusal(e, what)
            raise Skipped(f"{what} is refused: {str(e)[:160]}") from None

    def kill(self) -> None:
        """Kill the server by the user's command. Raises Skipped without one."""
        if self.kill_command is None:
            raise Skipped("needs --kill-command")
        subprocess.run(self.kill_command, shell=True, check=True, timeout=START_S)

    def sampler_scores(self, sampler: Any, row: Sequence[int]) -> Values:
        """Return the logprobs of all tokens but the first.

        One check asks for the entry of the first token too; the others do without.
        """
        found = self.got(sampler.compute_logprobs(types.ModelInput.from_ints(list(row))))
        values = [np.nan if x is None else x for x in found[1 - len(row) :]]
        expect(len(values) == len(row) - 1, f"{len(found)} logprobs of {len(row)} tokens")
        return np.asarray(values, np.float64)

    def score(self, model: Any, rows: "Rows") -> Values:
        """Return the logprobs of all targets by a forward pass."""
        return logprobs_in(self.got(model.forward(data_of(rows), "cross_entropy")))

    def train(self, model: Any, rows: "Rows", weights: Sequence[float] | None = None) -> Any:
        """Run forward_backward of cross_entropy."""
        data = data_of(rows, weights=weights)
        return self.got(model.forward_backward(data, "cross_entropy"))

    def step(self, model: Any, **adam: float) -> Any:
        return self.got(model.optim_step(types.AdamParams(**adam)))

    def plain_step(self, model: Any, alpha: float, **adam: float) -> Any:
        """Make a step of −alpha times the gradient."""
        given = {"learning_rate": alpha * EPS, "beta1": 0.0, "eps": EPS, **adam}
        return self.step(model, **given)

    def moved(self, prepare: Callable[[Any], None], alpha: float, seed: int = 1) -> Values:
        """Return how far a plain step moves the logprobs of `rows(9)`, after `prepare`."""
        model, probe = self.model(seed), rows(9)
        before = self.score(model, probe)
        prepare(model)
        self.plain_step(model, alpha)
        return self.score(model, probe) - before

    @property
    def alpha(self) -> float:
        """A step size at which the gradient of `rows(0)` moves logprobs by about MOVED.

        A check reads it before it makes models: the first time it ends their session.
        """
        if self.found_alpha is None:
            alpha = 1e-4
            for _ in range(12):
                mean = np.abs(self.moved(lambda m: self.train(m, rows(0)), alpha)).mean()
                expect(bool(np.isfinite(mean)), "a small step makes logprobs infinite")
                if MOVED / 3 < mean < MOVED * 1.2:  # further, steps are not linear
                    break
                alpha *= min(1e3, max(1e-3, MOVED / max(float(mean), 1e-9)))
            else:
                raise Failed("no step size moves the logprobs: are eps or learning_rate dropped?")
            self.found_alpha = alpha
            # Two random adapters can be near to each other by chance; so many are not.
            one, *others = (self.moved(lambda m: self.train(m, rows(0)), alpha) for _ in range(4))
            size = max(float(np.linalg.norm(one)), 1e-12)
            far = max(float(np.linalg.norm(one - other)) for other in others) / size
            self.drops_seeds = far > self.tolerance
            self.renew()  # frees the models of the search
        return self.found_alpha

    def aligned(self, found: Values, wanted: Values, otherwise: str) -> None:
        """Raise Failed unless `found` goes as far as `wanted` along it.

        What rounding adds to many logprobs is mostly across it, so bfloat16 hides less than it does
        from `same`.
        """
        off = float(found @ wanted / max(float(wanted @ wanted), 1e-12)) - 1
        allowed = max(ALIGNED, self.tolerance)
        expect(abs(off) <= allowed, f"{otherwise} (it is off by {off:+.0%})")

    def same(self, first: Values, second: Values, otherwise: str, tolerance: float = 0.0) -> None:
        """Raise Failed unless two vectors agree relative to the size of the second."""
        allowed = tolerance or self.tolerance
        off = float(np.linalg.norm(first - second) / max(float(np.linalg.norm(second)), 1e-12))
        expect(off <= allowed, f"{otherwise} (they differ by {off:.2g} of their size)")


Rows = list[list[int]]


def rows(seed: int, count: int = ROWS) -> Rows:
    """Return rows of drawn tokens; the last token of each is only a target."""
    drawn = np.random.default_rng(seed).integers(LOWEST, HIGHEST, (count, ROW_TOKENS + 1))
    return drawn.tolist()


def data_of(rows: Rows, weights: Sequence[float] | None = None, **fields: Any) -> list[Any]:
    """Return datums. `fields`: values of each row."""
    found: list[Any] = []
    for number, row in enumerate(rows):
        inputs = {name: tensor(values[number]) for name, values in fields.items()}
        inputs["target_tokens"] = tensor(row[1:], "int64")
        if not fields or weights is not None:
            own = [1.0] * (len(row) - 1) if weights is None else list(weights)
            inputs["weights"] = tensor(own)
        found.append(
            types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)
        )
    return found


def tensor(values: Any, dtype: Any = "float32") -> Any:
    """Return numbers of one row as the SDK sends them."""
    plain = np.asarray(values).tolist()
    return types.TensorData(data=plain, dtype=dtype, shape=[len(plain)])


def logprobs_in(output: Any) -> Values:
    """Return the logprobs of all rows as one vector."""
    found = [np.asarray(one["logprobs"].data, np.float64) for one in output.loss_fn_outputs]
    return np.concatenate(found)


def loss_in(output: Any) -> float:
    """Return loss:sum, or the sum of the losses of all tokens. Raises Failed without both."""
    if "loss:sum" in output.metrics:
        return float(output.metrics["loss:sum"])
    found = [one.get("elementwise_loss") for one in output.loss_fn_outputs]
    expect(None not in found, f"neither loss:sum nor elementwise_loss: {output.metrics}")
    return float(sum(np.sum(one.data) for one in found if one is not None))
