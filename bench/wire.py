"""A cheap client of the protocol: prepared bodies over persistent connections."""

import http.client
import json
from typing import Any

from skyrl_actors.api import schema
from tests.api.local import MODEL

TOKENS = 32
PROTO = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}


def batch(model_id: str, seq_id: int, forward_only: bool = False) -> bytes:
    message = schema.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy", forward_only=forward_only
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0" * TOKENS
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = b"\2\0\0\0\0\0\0\0" * TOKENS, schema.INT64
    return message.SerializeToString()


def sample(sampler_id: str, seq_id: int) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * TOKENS}]}
    return {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 16},
    }


class Wire:
    """A persistent connection to the service."""

    def __init__(self, port: int):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.connect()

    def post(
        self, path: str, body: dict[str, Any] | bytes, accept: str = "application/json"
    ) -> bytes:
        headers = {
            **(PROTO if isinstance(body, bytes) else JSON),
            "accept": accept,
            "x-api-key": "tml-bench",
        }
        content = body if isinstance(body, bytes) else json.dumps(body)
        self._connection.request("POST", f"/api/v1{path}", content, headers)
        answer = self._connection.getresponse()
        found = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {found[:300]!r}")
        return found

    def done(self, path: str, body: dict[str, Any] | bytes) -> bytes:
        """Submit a request, and wait for its answer."""
        request_id = json.loads(self.post(path, body))["request_id"]
        return self.post(
            "/retrieve_future",
            {"request_id": request_id},
            "application/x-protobuf, application/json",
        )

    def model(self, number: int = 0) -> tuple[str, str]:
        """Create a model. Return session id and model id."""
        session = json.loads(self.post("/create_session", {}))["session_id"]
        self.done(
            "/create_model", {"session_id": session, "model_seq_id": number, "base_model": MODEL}
        )
        return session, f"{session}:train:{number}"
