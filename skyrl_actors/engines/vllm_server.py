"""Client for a vLLM server: its OpenAI-compatible completions over HTTP, by tokens."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np

from skyrl_actors.messages.errors import ConfigError, InternalError, InvalidRequest, StateLost
from skyrl_actors.messages.narrowing import is_object
from skyrl_actors.messages.requests import SamplingParams, Shaping
from skyrl_actors.messages.results import PartialSample, SampleOutput, Sequence

EMPTY_CELL = (0, -99999.0)
CONNECT_S, SHORT_S, LOAD_S = 5.0, 30.0, 120.0
LARGE_BYTES = 2**20  # larger answers are decoded on another thread


class VllmServer:
    """One vLLM server by URL.

    Raises StateLost if the server does not answer or lacks an adapter, InvalidRequest if it refuses
    a request, and InternalError if it fails.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float):
        self.url = url
        self.timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            limits=limits,
            trust_env=False,
        )

    async def identify(self) -> tuple[str, int]:
        """Return the base model's name and its longest sequence in tokens.

        Raises ConfigError if the server is not a vLLM server with the needed functions.
        """
        version = await self._get("/version")
        if not isinstance(version.get("version"), str):
            raise ConfigError(
                f"engine.external {self.url} is not a vLLM server: GET /version answered "
                f"{str(version)[:200]}"
            )
        listed = await self._get("/v1/models")
        try:
            served = {
                m["id"]: int(m["max_model_len"])
                for m in listed["data"]
                if m.get("max_model_len") and not m.get("parent")
            }
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(
                f"engine.external {self.url} is not a vLLM server: GET /v1/models answered "
                f"{str(listed)[:200]}"
            ) from None
        if not served:
            raise ConfigError(f"engine.external {self.url} serves no model")
        name = next(iter(served))
        probe = SamplingParams(max_tokens=1, temperature=0.0)
        try:
            await self.complete(name, (0,), probe, "probe", SHORT_S)
        except (InvalidRequest, InternalError) as error:
            raise ConfigError(
                f"engine.external {self.url} cannot sample by tokens, which vLLM does since "
                f"0.10.2: {error}"
            ) from error
        if (await self._post("/v1/load_lora_adapter", {}, SHORT_S)).status_code == 404:
            raise ConfigError(
                f"engine.external {self.url} loads no adapters: start it with --enable-lora "
                "and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        return name, served[name]

    async def alive(self) -> bool:
        try:
            return (await self._client.get("/health", timeout=SHORT_S)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            answer = await self._client.get(path, timeout=SHORT_S)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"engine.external {self.url} does not answer: "
                f"{type(error).__name__} {error}".rstrip()
            ) from error
        try:
            found: Any = answer.json()
        except ValueError:
            found = answer.text
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"engine.external {self.url} needs an API key: name its variable in api_key_env"
            )
        if answer.status_code != 200 or not is_object(found):
            raise ConfigError(
                f"engine.external {self.url} is not a vLLM server: GET {path} answered "
                f"{answer.status_code} {str(found)[:200]}"
            )
        return found

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter. Raise InvalidRequest, with the server's text, if it cannot."""
        answer = await self._post(
            "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, LOAD_S
        )
        # A name is never used for other weights, so an adapter that is loaded already is right.
        if answer.status_code == 200 or "already been loaded" in answer.text:
            return
        if answer.status_code not in (400, 404, 422, 500):  # vLLM's answers for unusable files
            self._check(answer)
        raise InvalidRequest(
            f"adapter {name} cannot be loaded from {path} by {self.url}: {_reason(answer)}"
        )

    async def unload_adapter(self, name: str) -> None:
        # An adapter that is not loaded is no error.
        await self._post("/v1/unload_lora_adapter", {"lora_name": name}, SHORT_S)

    async def complete(
        self,
        model: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        version: str,
        timeout_s: float | None = None,
    ) -> SampleOutput:
        answer = await self._post(
            "/v1/completions", completion_body(model, prompt, params), timeout_s or self.timeout_s
        )
        self._check(answer)

        def decoded() -> SampleOutput:
            try:
                return sample_output(json.loads(answer.content), version, params)
            except (KeyError, TypeError, ValueError) as error:
                raise InternalError(
                    f"{self.url} sent an answer that cannot be decoded: "
                    f"{type(error).__name__} {error}"
                ) from error

        return await asyncio.to_thread(decoded) if len(answer.content) > LARGE_BYTES else decoded()

    async def grow(
        self,
        model: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        version: str,
        grown: Callable[[PartialSample], None],
    ) -> SampleOutput:
        """Complete one sample as a stream; call `grown` with the whole so far at each event.

        Does not support logprobs of the prompt.
        """
        body = completion_body(model, prompt, params) | {"stream": True}
        whole: dict[str, Any] = {
            "token_ids": [],
            "logprobs": {"token_logprobs": [], "top_logprobs": []},
            "finish_reason": None,
        }
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    self._check(answer)
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise StateLost(f"{self.url} broke off: {event['error']}")
                    for choice in event["choices"]:
                        extend(whole, choice)
                    grown(
                        PartialSample(
                            tuple(whole["token_ids"]), tuple(whole["logprobs"]["token_logprobs"])
                        )
                    )
        except httpx.HTTPError as error:
            raise self._connection_error(error) from error
        except (KeyError, TypeError, ValueError) as error:
            raise StateLost(f"{self.url} broke off: {type(error).__name__} {error}") from error
        if whole["finish_reason"] is None:
            raise StateLost(f"{self.url} broke off after {len(whole['token_ids'])} tokens")
        return sample_output({"choices": [whole]}, version, params)

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> httpx.Response:
        try:
            return await self._client.post(
                path, json=body, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S)
            )
        except httpx.HTTPError as error:
            raise self._connection_error(error) from error

    def _connection_error(self, error: httpx.HTTPError) -> Exception:
        if isinstance(error, httpx.ReadTimeout):
            return InternalError(f"{self.url} did not answer in time")
        return StateLost(f"{self.url} does not answer: {type(error).__name__} {error}".rstrip())

    def _check(self, answer: httpx.Response) -> None:
        if answer.status_code in (400, 422):
            raise InvalidRequest(_reason(answer))
        if answer.status_code == 404 or answer.status_code >= 500:
            raise StateLost(f"{self.url} answered {answer.status_code}: {_reason(answer)}")
        if answer.status_code != 200:
            raise InternalError(f"{self.url} answered {answer.status_code}: {_reason(answer)}")

    async def close(self) -> None:
        await self._client.aclose()


def _reason(answer: httpx.Response) -> str:
    try:
        found: Any = answer.json()
    except ValueError:
        return answer.text[:500]
    error = found.get("error", found) if is_object(found) else found
    return str(error.get("message", error) if is_object(error) else error)[:500]


def completion_body(model: str, prompt: tuple[int, ...], params: SamplingParams) -> dict[str, Any]:
    """Return the request body. It sets every field that the server's defaults could change."""
    if params.scores_prompt:
        raise InvalidRequest(
            "target_prompt_logprobs and prompt_alt_tokens_k need engines of this service, "
            "not one by URL"
        )
    if params.processes:
        raise InvalidRequest(
            "tempered_logprobs and processed_logprobs need engines of this service, not one by URL"
        )
    stop, shaping = params.stop, params.shaping or Shaping()
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": params.max_tokens,
        "n": params.num_samples,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": shaping.min_p,
        "min_tokens": 0,
        "repetition_penalty": shaping.repetition_penalty,
        "presence_penalty": shaping.presence_penalty,
        "frequency_penalty": shaping.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in shaping.logit_bias} or None,
        "seed": params.seed,
        "stop": [s for s in stop or () if isinstance(s, str)],
        "stop_token_ids": [s for s in stop or () if isinstance(s, int)],
        "ignore_eos": stop is not None and not params.stop_at_end_too,
        "skip_special_tokens": False,  # a stop text can be one
        "logprobs": params.topk_sample_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if shaping.json_schema is not None:
        body["response_format"] = _response_format(shaping.json_schema)
    if params.prompt_logprobs or params.topk_prompt_logprobs:
        body["prompt_logprobs"] = params.topk_prompt_logprobs
    return body


def _response_format(schema: str) -> dict[str, Any]:
    if not schema:
        return {"type": "json_object"}
    named = {"name": "answer", "schema": json.loads(schema)}
    return {"type": "json_schema", "json_schema": named}


def extend(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    """Append one event of a stream to the whole."""
    whole["token_ids"] += choice.get("token_ids") or ()
    of_tokens = choice.get("logprobs") or dict[str, Any]()
    for kind in ("token_logprobs", "top_logprobs"):
        whole["logprobs"][kind] += of_tokens.get(kind) or ()
    whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]


def sample_output(body: dict[str, Any], version: str, params: SamplingParams) -> SampleOutput:
    """Decode an answer. Raise InternalError if requested fields are missing."""
    sequences: list[Sequence] = []
    for choice in body["choices"]:
        reason, tokens, of_tokens = (
            choice["finish_reason"],
            choice.get("token_ids"),
            choice.get("logprobs"),
        )
        if tokens is None or of_tokens is None or len(of_tokens["token_logprobs"]) != len(tokens):
            raise InternalError("the server's answer lacks token_ids or a logprob for each of them")
        if reason not in ("stop", "length"):
            raise InternalError(f"the server ended a sample with {reason!r}")
        best = (
            _best([_by_id(row) for row in of_tokens["top_logprobs"]], k)
            if (k := params.topk_sample_logprobs)
            else (None, None)
        )
        logprobs = np.asarray(of_tokens["token_logprobs"], np.float32)
        shown = logprobs if params.shows_processed else None
        sequences.append(
            Sequence(
                tokens=np.asarray(tokens, np.int32),
                logprobs=logprobs,
                stop_reason=reason,
                topk_ids=best[0],
                topk_logprobs=best[1],
                tempered=shown,
            )
        )
    return SampleOutput(
        sequences=tuple(sequences),
        version=version,
        **_of_prompt(body, params),
        cached_tokens=_cached(body),
    )


def _cached(body: dict[str, Any]) -> int:
    usage = body.get("usage") or dict[str, Any]()
    details = usage.get("prompt_tokens_details") or dict[str, Any]()
    return details.get("cached_tokens") or 0


def _of_prompt(body: dict[str, Any], params: SamplingParams) -> dict[str, Any]:
    rows, prompt = (
        body["choices"][0].get("prompt_logprobs"),
        body["choices"][0].get("prompt_token_ids"),
    )
    if not (params.prompt_logprobs or params.topk_prompt_logprobs):
        return {}
    if rows is None or prompt is None:
        raise InternalError("the server's answer lacks the prompt's logprobs")
    kept = len(prompt) if params.prompt_logprobs_last_n is None else params.prompt_logprobs_last_n
    first = len(rows) - kept
    shown = [_own_logprobs(row) if i >= first else {} for i, row in enumerate(rows)]
    own = [row.get(token, np.nan) for token, row in zip(prompt, shown, strict=True)]
    fields: dict[str, Any] = {"prompt_logprobs": np.asarray(own, np.float32)}
    if k := params.topk_prompt_logprobs:
        fields["topk_prompt_ids"], fields["topk_prompt_logprobs"] = _best(shown, k)
    return fields


def _own_logprobs(row: dict[str, dict[str, float]] | None) -> dict[int, float]:
    return {int(token): entry["logprob"] for token, entry in (row or {}).items()}


def _by_id(row: dict[str, float] | None) -> dict[int, float]:
    return {int(token.removeprefix("token_id:")): logprob for token, logprob in (row or {}).items()}


def _best(rows: list[dict[int, float]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and logprobs of the k most likely tokens, best first; both [P, k].

    The sampled token is cut if it is not among the k.
    """
    best = [sorted(row.items(), key=lambda cell: (-cell[1], cell[0]))[:k] for row in rows]
    padded = [row + [EMPTY_CELL] * (k - len(row)) for row in best]
    return (
        np.asarray([[token for token, _ in row] for row in padded], np.int32),
        np.asarray([[logprob for _, logprob in row] for row in padded], np.float32),
    )
