"""The API as tables for people, from the routes and the config: `python -m skyrl_actors.api.table > docs/api.md`."""

import inspect
from collections.abc import Iterable

from fastapi.routing import APIRoute

from skyrl_actors.api import not_served
from skyrl_actors.api.app import build_app
from skyrl_actors.config.base import FrozenConfig
from skyrl_actors.config.cluster import LimitsConfig, SdkFlags
from skyrl_actors.messages import errors

HEAD = """# The HTTP API

Paths of the Tinker protocol, for `tinker` SDK 0.3.0 to 0.38.0 without a branch for any of them (`make sdk-matrix`), and of OpenAI's API below
`/v1`. Bodies are JSON; `/forward_backward` also takes protobuf, plain or zstd. A *future* is `{"request_id": …}`, whose answer is had from
`/retrieve_future`: protobuf where the client accepts it and a batch or sample answers, else JSON. `GET /api/v1/openapi.json` has the fields.

Logprobs of samples are those of the model at temperature 1, before `top_k` and `top_p`. `"tempered_logprobs": true` in the body of a sample, or
`http.tempered_logprobs` in the config, gives those of softmax(logits / temperature) instead ([more](sdk.md#logprobs-and-seeds-of-samples)).
"""
FUTURES = {
    "create_model", "forward_backward", "forward", "optim_step", "save_weights", "save_for_sampler", "save_external", "load_weights",
    "unload_model", "asample", "create_custom_loss",
}  # fmt: skip
SOLE_VALUES = """
Fields with one served value, others are refused by name: `kind` of `save_weights_for_sampler`: `snapshot`; `optimizer_config.type`: `adamw`, `adamw8bit` (moments of 8 bits, by bitsandbytes), or `muon` (whose momentum is `beta1`);
`record_stability_info`: false (it is for the loss `stable_reinforce`, whose objective is not public; use `importance_sampling`); chunks of a prompt or a datum: text
tokens; `age_encryption_recipients`: none. Fields that are not of the protocol are ignored.
"""


def markdown() -> str:
    return HEAD + "".join(
        [_endpoints(), SOLE_VALUES, _not_served(), _keys(LimitsConfig, "limits"), _keys(SdkFlags, "http.sdk"), _errors()]
    )


def _endpoints() -> str:
    routes = [route for route in build_app().routes if isinstance(route, APIRoute) and route.include_in_schema]
    rows = sorted((route.path, method, route) for route in routes for method in route.methods)
    found = [
        (f"{method} `{path}`", "future" if route.name in FUTURES else "at once", _said(route)) for path, method, route in rows
    ]
    return _table("Endpoints", ("call", "answer", "what it does"), found)


def _said(route: APIRoute) -> str:
    text = inspect.getdoc(route.endpoint)
    assert text, f"{route.path} does not say what it does"
    return " ".join(text.split())


def _not_served() -> str:
    rows = [(f"{method} `/api/v1{path}`", reason) for (method, path), reason in not_served.CALLS.items()]
    return _table("Not served: 404", ("call", "why"), rows)


def _keys(config: type[FrozenConfig], section: str) -> str:
    fields = config.model_fields.items()
    rows = [(f"`{section}.{name}`", f"{field.default}", field.description or name.replace("_", " ")) for name, field in fields]
    return _table(
        f"`{section}` of the config", ("key", "default", "what it bounds" if section == "limits" else "what it says"), rows
    )


def _errors() -> str:
    kinds = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, errors.UserError)]
    said = {
        "UserError": "any other refusal", "InvalidRequest": "a field is missing, mismatched, out of range or unknown",
        "NotFound": "an id or path that does not exist, or is another key's",
        "Conflict": "a sequence number used before with another body, or a name that is taken (SDKs would repeat 409 for minutes)",
        "CapacityError": "no room now; Retry-After says when to ask again",
    }  # fmt: skip
    rows = [
        (f"{400 if cls.status == 409 else cls.status}", f"`{name}`", said[name]) for name, cls in ((c.__name__, c) for c in kinds)
    ]
    rows += [
        ("401", "", "an unknown API key, or a token that has ended"), ("413", "`BodyTooLarge`", "also when decompressed, or with sparse tensors made dense"),
        ("408", "", "`/retrieve_future`: not ready; ask again"), ("410", "", "a request id or session that is forgotten"),
        ("503", "", "a passing fault of ours; SDKs ask again"),
        ("200 with `error`", "", "`/retrieve_future`: the request failed, finally; `category` says whose fault it is"),
    ]  # fmt: skip
    return _table('Errors: `{"detail": …, "category": "user" | "server"}`', ("status", "kind", "when"), sorted(rows))


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join([f"\n## {title}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines]) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
