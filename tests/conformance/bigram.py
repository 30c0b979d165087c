"""A server with a model of bigrams in numpy, which can have faults, for tests of the kit.

HTTP application, controller and journal are real. The logits of a token are a fixed row, plus an
adapter: base[t] + scale · B A[:, t]. An image is read as tokens that its digest decides.
"""

import asyncio
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_actors.api import schema
from skyrl_actors.controller.checkpoints import SAVED_BY, SPEC_FILE
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.image_form import ImageForm
from skyrl_actors.messages.model import AdamParams, CheckpointForm, LossCall, ModelSpec
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import LossOutput, SampleOutput, Sequence
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest
from tests.api.local import MODEL, AnsweringBackend
from tests.fakes import changed

VOCAB = 320
ROUNDS = False  # logits to bfloat16, as a head in bfloat16 does
FORM = ImageForm(token=250, patch=14, merge=2, least=64, most=1 << 20)
BASE = np.random.default_rng(0).normal(size=(VOCAB, VOCAB))
Arrays = dict[str, np.ndarray]


class Bigrams:
    """An adapter with its gradients and AdamW."""

    def __init__(self, spec: ModelSpec, seed: int):
        assert spec.lora is not None
        self.spec, self.scale = spec, spec.lora.alpha / spec.lora.rank
        draw = np.random.default_rng(seed)
        rank = spec.lora.rank
        self.weights: Arrays = {
            "a": draw.normal(size=(rank, VOCAB)) / 8,
            "b": np.zeros((VOCAB, rank)),
        }
        self.drop_gradients()
        self.drop_moments()

    def drop_gradients(self) -> None:
        self.gradients = {name: np.zeros_like(x) for name, x in self.weights.items()}

    def drop_moments(self) -> None:
        self.steps = 0
        self.first = {name: np.zeros_like(x) for name, x in self.weights.items()}
        self.second = {name: np.zeros_like(x) for name, x in self.weights.items()}

    def copied(self) -> Arrays:
        return {name: x.copy() for name, x in self.weights.items()}


def seen(digest: str, num_tokens: int) -> np.ndarray:
    """Return the tokens that an image is read as."""
    return 20 + np.frombuffer(bytes.fromhex(digest) * num_tokens, np.uint8)[:num_tokens] % 180


def logits_of(weights: Arrays | None, scale: float, tokens: np.ndarray) -> np.ndarray:
    """Return [T, V]."""
    own = BASE[tokens]
    if weights is not None:
        own = own + scale * (weights["b"] @ weights["a"][:, tokens]).T
    return rounded(own) if ROUNDS else own


def rounded(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16, which is the first half of a float32; ties go to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def log_softmax(z: np.ndarray) -> np.ndarray:
    highest = z.max(-1, keepdims=True)
    return z - highest - np.log(np.exp(z - highest).sum(-1, keepdims=True))


def loss_and_slope(call: LossCall, p: np.ndarray, fields: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's loss, and its slope by p."""
    w = fields.get("weights", np.ones_like(p)).astype(np.float64)
    if call.name == "cross_entropy":
        return -w * p, -w
    a, q = fields["advantages"].astype(np.float64), fields["logprobs"].astype(np.float64)
    with np.errstate(over="ignore"):
        r = np.exp(p - q)
    low, high = (float(call.config.get(f"clip_{s}_threshold", 0)) for s in ("low", "high"))
    if call.name == "ppo":
        clipped = np.clip(r, low, high) * a
        return -np.minimum(r * a, clipped), np.where(r * a <= clipped, -r * a, 0.0)
    if call.name == "cispo":
        return -np.clip(r, low, high) * a * p, -np.clip(r, low, high) * a
    if call.name == "dro":
        beta = float(call.config["beta"])
        return -(p * a - 0.5 * beta * (p - q) ** 2), -(a - beta * (p - q))
    return -r * a, -r * a


class BigramBackend(AnsweringBackend):
    """Computes in float64. `faults` are what it does wrong."""

    def __init__(self, base_folder: str, killed: Path):
        super().__init__(base_folder)
        self.faults: set[str] = set()
        self.own: dict[str, Bigrams] = {}
        self.samplers: dict[str, tuple[str, Arrays, float]] = {}
        self._killed = killed  # a file that a test makes to kill the server

    def _has(self, fault: str) -> bool:
        return fault in self.faults

    async def start(self, epoch: int) -> Any:
        return changed(await super().start(epoch), images=FORM)

    def _notice_kill(self) -> None:
        if self._killed.exists():
            self._killed.unlink()
            if self._has("loses gradients"):
                for one in self.own.values():
                    one.drop_gradients()
            if self._has("computes again"):
                for one in self.own.values():
                    one.gradients = {name: 2 * g for name, g in one.gradients.items()}
            if self._has("loses samplers"):
                self.samplers = {
                    name: (model, {n: 0 * x for n, x in weights.items()}, scale)
                    for name, (model, weights, scale) in self.samplers.items()
                }

    async def create_model(self, spec: ModelSpec, precondition: OpPrecondition) -> None:
        await super().create_model(spec, precondition)
        seed = 0 if self._has("drops seeds") else spec.seed
        if self._has("draws seeds"):
            seed = zlib.crc32(spec.model_id.encode())
        self.own[spec.model_id] = Bigrams(spec, seed)
        if self._has("shares weights") and len(self.own) > 1:
            first = next(iter(self.own.values()))
            self.own[spec.model_id].weights = first.weights

    async def delete_model(self, spec: ModelSpec) -> None:
        await super().delete_model(spec)
        self.own.pop(spec.model_id, None)

    async def forward_backward(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        columns: Columns,
        loss: LossCall | None,
        forward_only: bool,
        weight: float = 1.0,
    ) -> LossOutput:
        assert loss is not None
        if self._has("breaks in losses") and loss.name != "cross_entropy":
            raise KeyError(f"no kernel for {loss.name}")
        model = self.own[spec.model_id]
        tokens: Any = self._read(columns)
        targets: Any = columns.fields["target_tokens"]
        if self._has("mixes rows"):
            tokens = np.roll(tokens, 1)
        z = log_softmax(logits_of(model.weights, model.scale, tokens))
        p = z[np.arange(len(tokens)), targets]
        values, slope = loss_and_slope(loss, p, self._inputs(columns))
        fault = self._fault_of(values, spec)
        if fault:
            raise fault
        if self._has("averages"):
            values, slope = values / len(values), slope / len(values)
        if not forward_only or self._has("forward adds"):
            self._add(model, z, slope, tokens, targets, loss)
        if forward_only and self._has("forward clears"):
            model.drop_gradients()
        self._notice_kill()
        shown = p[::-1].copy() if self._has("reverses rows") else p
        shown = -shown if self._has("returns losses") else shown
        return LossOutput(
            offsets=columns.offsets,
            fields={"logprobs": shown.astype(np.float32)},
            metrics={} if self._has("forgets losses") else {"loss:sum": float(values.sum())},
            widths=columns.widths,
        )

    def _read(self, columns: Columns) -> np.ndarray:
        tokens = np.array(columns.tokens)
        for row in range(columns.num_rows):
            for one in columns.images_of(row):
                if not self._has("trains blind"):
                    tokens[one.start : one.start + one.num_tokens] = seen(
                        one.digest, one.num_tokens
                    )
        return tokens

    def _inputs(self, columns: Columns) -> dict[str, np.ndarray]:
        fields: dict[str, Any] = dict(columns.fields)
        if self._has("drops weights"):
            fields.pop("weights", None)
        if self._has("drops sampling logprobs"):
            fields["logprobs"] = np.zeros(len(columns.tokens), np.float32)
        return fields

    def _fault_of(self, values: np.ndarray, spec: ModelSpec) -> Exception | None:
        from skyrl_actors.messages.errors import InvalidRequest

        if np.isfinite(values).all():
            return None
        if self._has("accepts infinity"):
            values[:] = 0.0
            return None
        if self._has("breaks on infinity"):
            self.own[spec.model_id].drop_gradients()
        return InvalidRequest("the loss is not finite")

    def _add(
        self,
        model: Bigrams,
        z: np.ndarray,
        slope: np.ndarray,
        tokens: np.ndarray,
        targets: np.ndarray,
        loss: LossCall,
    ) -> None:
        if self._has("last call wins"):
            model.drop_gradients()
        if self._has("turns policy gradients") and loss.name != "cross_entropy":
            slope = -slope
        if self._has("trains small ranks") and model.weights["a"].shape[0] > 8:
            return
        of_z = -np.exp(z) * slope[:, None]
        of_z[np.arange(len(tokens)), targets] += slope
        of_z *= model.scale
        model.gradients["b"] += of_z.T @ model.weights["a"][:, tokens].T
        np.add.at(model.gradients["a"].T, tokens, of_z @ model.weights["b"])

    async def optim_step(
        self, spec: ModelSpec, precondition: OpPrecondition, adam: AdamParams
    ) -> dict[str, float]:
        await super().optim_step(spec, precondition, adam)
        self._notice_kill()
        model = self.own[spec.model_id]
        adam = self._as_taken(adam)
        model.steps += 1
        norm = float(np.sqrt(sum((g**2).sum() for g in model.gradients.values())))
        clipped = 1.0
        if adam.grad_clip_norm and norm > adam.grad_clip_norm:
            clipped = adam.grad_clip_norm / norm
        for name, weight in model.weights.items():
            g = clipped * model.gradients[name]
            weight *= 1 - adam.learning_rate * adam.weight_decay
            model.first[name] = adam.beta1 * model.first[name] + (1 - adam.beta1) * g
            model.second[name] = adam.beta2 * model.second[name] + (1 - adam.beta2) * g**2
            m = model.first[name] / (1 - adam.beta1**model.steps)
            v = model.second[name] / (1 - adam.beta2**model.steps)
            weight -= adam.learning_rate * m / (np.sqrt(v) + adam.eps)
        if not self._has("keeps gradients"):
            model.drop_gradients()
        return {}

    def _as_taken(self, adam: AdamParams) -> AdamParams:
        for field, value in {
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-12,
            "weight_decay": 0.0,
            "grad_clip_norm": 0.0,
            "learning_rate": 1e-4,
        }.items():
            if self._has(f"drops {field}"):
                adam = replace(adam, **{field: value})
        if self._has("halves epsilon"):
            adam = replace(adam, eps=adam.eps**0.9)
        return adam

    async def drop_gradients(self, spec: ModelSpec, precondition: OpPrecondition) -> None:
        self.own[spec.model_id].drop_gradients()

    async def save_checkpoint(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        folder: str,
        form: CheckpointForm,
        mark: str,
    ) -> None:
        model, path = self.own[spec.model_id], Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / SPEC_FILE).write_text(json.dumps(asdict(spec)))
        (path / SAVED_BY).write_text(mark)
        moments = {
            f"{kind}_{n}": x
            for kind in ("first", "second")
            for n, x in getattr(model, kind).items()
        }
        np.savez(path / "weights.npz", steps=model.steps, **model.weights, **moments)

    async def load_checkpoint(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        folder: str,
        with_optimizer: bool,
        mix: Any = None,
    ) -> None:
        model = self.own[spec.model_id]
        with np.load(Path(folder) / "weights.npz") as found:
            if not self._has("loads nothing"):
                model.weights = {name: found[name].copy() for name in model.weights}
            model.drop_gradients()
            if with_optimizer and not self._has("loads no moments"):
                model.steps = int(found["steps"])
                for kind in ("first", "second"):
                    setattr(model, kind, {n: found[f"{kind}_{n}"].copy() for n in model.weights})
            elif not self._has("keeps moments"):
                model.drop_moments()

    async def save_for_sampler(
        self, spec: ModelSpec, precondition: OpPrecondition, version: str, written: bool = False
    ) -> SamplerWeights:
        model = self.own[spec.model_id]
        self.samplers[version] = spec.model_id, model.copied(), model.scale
        manifest = WeightManifest(version=version, kind="lora", path=f"/x/{version}", num_bytes=1)
        return SamplerWeights(version=version, parts=(manifest,))

    async def open_sampler(self, base_model: str, folder: str, version: str) -> SamplerWeights:
        content = json.loads((Path(folder) / SPEC_FILE).read_text())
        with np.load(Path(folder) / "weights.npz") as found:
            weights = {name: found[name].copy() for name in ("a", "b")}
        if self._has("opens new weights"):
            weights["b"] *= 0
        scale = content["lora"]["alpha"] / content["lora"]["rank"]
        self.samplers[version] = content["model_id"], weights, scale
        manifest = WeightManifest(version=version, kind="lora", path=folder, num_bytes=1)
        return SamplerWeights(version=version, parts=(manifest,))

    def _weights_of(self, weights: SamplerWeights) -> tuple[Arrays | None, float]:
        if not weights.parts:
            newest = next(reversed(self.own.values()), None)
            if self._has("trains the base") and newest:
                return newest.weights, newest.scale
            return None, 1.0
        model, own, scale = self.samplers[weights.version]
        if self._has("samples live weights") and model in self.own:
            return self.own[model].weights, scale
        return own, scale

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        pictures: Any = (),
    ) -> SampleOutput:
        self._notice_kill()
        own, scale = self._weights_of(weights)
        seed = 0 if self._has("drops sampling seeds") else params.seed or 0
        if self._has("draws sampling seeds"):
            seed = zlib.crc32(request_id.encode())
        count = 1 if self._has("draws once") else params.num_samples
        sequences = [self._drawn(own, scale, prompt, params, seed + i) for i in range(count)]
        logprobs = None
        for one in pictures:
            place = 0 if self._has("moves images") else one.place
            read = np.array(prompt)
            if not self._has("is blind"):
                read[place : place + one.num_tokens] = seen(one.digest, one.num_tokens)
            prompt = tuple(read.tolist())
        if params.prompt_logprobs:
            z = log_softmax(logits_of(own, scale, np.asarray(prompt[:-1])))
            scored = z[np.arange(len(prompt) - 1), list(prompt[1:])]
            if self._has("scores otherwise"):
                scored = scored - 0.3
            logprobs = np.asarray([np.nan, *scored], np.float32)
        return SampleOutput(
            sequences=tuple(sequences), version=weights.version, prompt_logprobs=logprobs
        )

    def _drawn(
        self,
        own: Arrays | None,
        scale: float,
        prompt: tuple[int, ...],
        params: SamplingParams,
        seed: int,
    ) -> Sequence:
        random, last = np.random.default_rng(seed), prompt[-1]
        tokens: list[int] = []
        logprobs: list[float] = []
        stop = () if self._has("drops stops") else params.stop or ()
        limit = 9 if self._has("drops max_tokens") else params.max_tokens
        reason = "length"
        for _ in range(limit):
            z = log_softmax(logits_of(own, scale, np.asarray([last]))[0])
            last = int(self._choice(random, z, params))
            tokens.append(last)
            logprobs.append(float(z[last]) - (0.4 if self._has("shows other logprobs") else 0))
            if last in stop:
                reason = "stop"
                break
        return Sequence(
            tokens=np.asarray(tokens, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            stop_reason=reason,
        )

    def _choice(self, random: Any, z: np.ndarray, params: SamplingParams) -> int:
        temperature = 1.0 if self._has("drops temperature") else params.temperature
        if temperature == 0:
            return int(z.argmax())
        p = np.exp(log_softmax(z / temperature))
        order = np.argsort(-p)
        left = np.ones(len(p), bool)
        if params.top_k > 0 and not self._has("drops top_k"):
            left[order[params.top_k :]] = False
        if params.top_p < 1:
            left[order[1:][np.cumsum(p[order])[:-1] >= params.top_p]] = False
        if self._has("draws evenly"):
            p = np.ones_like(p)
        p = np.where(left, p, 0)
        return int(random.choice(len(p), p=p / p.sum()))


# HTTP faults. `body` is that of a request, `answer` that of a successful answer.
Change = Callable[[dict[str, Any]], dict[str, Any]]
ANSWERS: dict[str, tuple[str, Change]] = {
    "hides models": (
        "/get_server_capabilities",
        lambda a: {**a, "supported_models": [{"model_name": "other"}]},
    ),
    "tells another rank": ("/get_info", lambda a: {**a, "lora_rank": 99}),
    "hides checkpoints": ("/checkpoints", lambda a: {**a, "checkpoints": []}),
    "serves aliases": (
        "/get_server_capabilities",
        lambda a: {**a, "supported_models": [*a["supported_models"], {"model_name": OTHER}]},
    ),
    "forgets the rank of runs": ("/training_runs/", lambda a: {**a, "lora_rank": 99}),
}


OTHER = "other/model"  # a second name of the base model
SECOND_KEY = "tml-two"


RESULTS: dict[str, dict[str, Any]] = {
    "SaveWeights": {"type": "save_weights", "path": "tinker://m/weights/w"},
    "LoadWeights": {"type": "load_weights", "path": "tinker://m/weights/w"},
    "CreateModel": {"type": "create_model", "model_id": "m"},
}


class Faulty:
    """ASGI middleware with faults of the edge."""

    def __init__(self, app: Any, faults: Callable[[], set[str]]):
        self._app, self._faults = app, faults
        self._numbers: dict[str, int] = {}
        self._asked: set[str] = set()
        self._last: bytes | None = None
        self._flooded = 0.0  # when the first key asked for training

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        faults = self._faults()
        if scope["type"] != "http" or not faults:
            await self._app(scope, receive, send)
            return
        path, body = scope["path"], b""
        more = True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if "does repeats" in faults:
            body = self._renumbered(path, body, dict(scope["headers"]))
        if "serves aliases" in faults and path.endswith("/create_model"):
            body = body.replace(OTHER.encode(), MODEL.encode())
        await asyncio.sleep(self._delay(path, dict(scope["headers"]), faults))
        sent = False

        async def again() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        parts: list[Any] = []

        async def keep(message: Any) -> None:
            parts.append(message)

        headers = [(k, v) for k, v in scope["headers"] if k.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._app({**scope, "headers": headers}, again, keep)
        status, content = parts[0]["status"], b"".join(p.get("body", b"") for p in parts[1:])
        kind = dict(headers).get(b"x-tinker-request-type", b"").decode()
        if "accepts all" in faults and b'"error"' in content and kind in RESULTS:
            status, content = 200, json.dumps(RESULTS[kind]).encode()
        status, content = self._changed(path, body, status, content, faults)
        kept = [
            (k, v)
            for k, v in parts[0]["headers"]
            if k.lower() not in (b"content-length", b"content-encoding")
        ]
        await send(
            {
                **parts[0],
                "status": status,
                "headers": [*kept, (b"content-length", str(len(content)).encode())],
            }
        )
        await send({"type": "http.response.body", "body": content})

    def _delay(self, path: str, headers: dict[bytes, bytes], faults: set[str]) -> float:
        if "polls" in faults and path.endswith("/retrieve_future"):
            return 0.8  # far above `--latency` and the noise of a busy machine
        if "waits in one queue" in faults and "/training_runs/" in path:
            return 3.0
        if path.endswith("/forward_backward"):
            if headers.get(b"x-api-key") != SECOND_KEY.encode():
                self._flooded = time.monotonic()
            elif "serves in order" in faults and time.monotonic() - self._flooded < 2:
                return 15.0  # longer than half of the flood, also on a slow machine
        return 0.0

    def _renumbered(self, path: str, body: bytes, headers: dict[bytes, bytes]) -> bytes:
        if headers.get(b"content-type", b"").startswith(b"application/x-protobuf"):
            request = schema.ForwardBackwardRequest.FromString(body)
            request.seq_id = self._next_number(request.model_id)
            return request.SerializeToString()
        if not path.endswith("/retrieve_future") and body.startswith(b"{"):
            found = json.loads(body)
            if "seq_id" in found and "model_id" in found:
                found["seq_id"] = self._next_number(found["model_id"])
                return json.dumps(found).encode()
        return body

    def _next_number(self, model: str) -> int:
        self._numbers[model] = self._numbers.get(model, 0) + 1
        return self._numbers[model]

    def _changed(
        self, path: str, body: bytes, status: int, content: bytes, faults: set[str]
    ) -> tuple[int, bytes]:
        if status == 200 and b"request_id" in content and not path.endswith("retrieve_future"):
            self._last = content
        if "accepts all" in faults and 400 <= status < 500 and status != 408 and self._last:
            return 200, self._last
        if "breaks" in faults and status == 422:
            return 503, b"{}"
        if "forgets results" in faults and path.endswith("retrieve_future") and status == 200:
            if body in self._asked:
                return 404, b'{"detail": "unknown"}'
            self._asked.add(body)
        for fault, (part, change) in ANSWERS.items():
            if fault in faults and part in path and status == 200:
                return status, json.dumps(change(json.loads(content))).encode()
        return status, content
