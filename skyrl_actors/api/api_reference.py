"""Generate docs/reference/api.md from the routes and the config.

Run `python -m skyrl_actors.api.api_reference > docs/reference/api.md`.
"""

import inspect
from collections.abc import Iterable

from fastapi.routing import APIRoute

from skyrl_actors.api import not_served, openai_wire, without_effect
from skyrl_actors.api.app import build_app
from skyrl_actors.config.frozen import FrozenConfig
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.config.sdk_flags import FLAGS
from skyrl_actors.messages import errors

HEAD = """# The HTTP API

The service serves the Tinker protocol below `/api/v1` and OpenAI's API below `/v1`. The Tinker
protocol works with `tinker` SDK 0.3.0 to 0.38.0, without a code branch for single versions
(`make sdk-matrix`). `python -m skyrl_actors.api.api_reference` generates this page.

- Bodies are JSON. `/forward_backward` also accepts protobuf, plain or compressed with zstd.
- A *future* is `{"request_id": …}`. `/retrieve_future` returns its result. The results of batches
  and samples are protobuf if the client accepts it. All other results are JSON.
- `GET /api/v1/openapi.json` describes the fields.
- The logprobs of samples are those of the model at temperature 1, before `top_k` and `top_p`. For
  those of softmax(logits / temperature), set `"tempered_logprobs": true` in the body of a sample,
  or `http.tempered_logprobs` in the config ([more](../how-to/use_the_sdk.md)). For those of the
  distribution that samples come from, also restricted by `top_k` and `top_p`, use
  `processed_logprobs` in the same places.
"""
FUTURES = {
    "create_model",
    "forward_backward",
    "forward",
    "optim_step",
    "save_weights",
    "save_for_sampler",
    "save_external",
    "load_weights",
    "unload_model",
    "asample",
    "create_custom_loss",
}
SOLE_VALUES = """
Some fields accept only these values. Other values are refused with the name of the field.

| field | accepted values |
|---|---|
| `kind` of `save_weights_for_sampler` | `snapshot` |
| `optimizer_config.type` | `adamw`, `adamw8bit` (8-bit moments, by bitsandbytes) \
or `muon` (its momentum is `beta1`) |
| `record_stability_info` | false (it is for the loss `stable_reinforce`, \
whose objective is not public; use `importance_sampling`) |
| chunks of a prompt or a datum | text tokens |
| `age_encryption_recipients` | public keys of age (`age1…`) or of SSH, up to 64 |
| `destination_project_id` of `copy_weights` | any text; each copy gets a session of its own, \
in the project `local` |
| `owner.type` of `sessions/search` | `own`, `accessible` |
| `train_attn`, `train_mlp`, `train_unembed` with rank 0 | true \
(a full fine-tune trains all weights) |

Fields outside the protocol are ignored.
"""


def markdown() -> str:
    """Return the page as Markdown."""
    return HEAD + "".join(
        [
            _endpoints(),
            SOLE_VALUES,
            _without_effect(),
            _not_served(),
            _keys(LimitsConfig, "limits"),
            _flags(),
            _errors(),
        ]
    )


def _endpoints() -> str:
    routes = [
        route
        for route in build_app().routes
        if isinstance(route, APIRoute) and route.include_in_schema
    ]
    rows = sorted((route.path, method, route) for route in routes for method in route.methods)
    found = [
        (f"{method} `{path}`", "future" if route.name in FUTURES else "direct", _about(route))
        for path, method, route in rows
    ]
    return _table("Endpoints", ("call", "answer", "meaning"), found)


def _about(route: APIRoute) -> str:
    text = inspect.getdoc(route.endpoint)
    assert text, f"{route.path} has no docstring"
    return " ".join(text.split())


def _not_served() -> str:
    rows = [
        (f"{method} `/api/v1{path}`", reason) for (method, path), reason in not_served.CALLS.items()
    ]
    return _table("Not served: 404", ("call", "reason"), rows)


def _without_effect() -> str:
    rows = [
        (f"`{one.field}` of `{one.call}`", one.reason)
        for one in sorted(without_effect.FIELDS, key=lambda one: (one.call, one.field))
    ]
    rows += [
        (f"`{field}` of `/v1`", reason) for field, reason in openai_wire.WITHOUT_EFFECT.items()
    ]
    return _table("Accepted without effect", ("field", "reason"), rows)


def _keys(config: type[FrozenConfig], section: str) -> str:
    fields = config.model_fields.items()
    rows = [
        (f"`{section}.{name}`", f"{field.default}", field.description or name.replace("_", " "))
        for name, field in fields
    ]
    return _table(f"Config keys of `{section}`", ("key", "default", "meaning"), rows)


def _flags() -> str:
    rows = [(f"`{name}`", f"{flag.default}", flag.meaning) for name, flag in FLAGS.items()]
    return _table("Flags of `http.sdk`", ("flag", "default", "meaning"), rows)


def _errors() -> str:
    kinds = [
        cls
        for cls in vars(errors).values()
        if inspect.isclass(cls) and issubclass(cls, errors.UserError)
    ]
    meanings = {
        "UserError": "any other refusal",
        "InvalidRequest": "a field is missing, mismatched, out of range or unknown",
        "NotFound": "an id or path that does not exist or belongs to another API key",
        "Conflict": "a sequence number that was used with another body, "
        "or a name that is in use (not 409, which SDKs would retry for minutes)",
        "CapacityError": "a limit is reached; retry after the time in Retry-After",
        "QuotaUsed": "the API key has used its tokens of the day; SDKs pause for up to an hour "
        "(429 on OpenAI's routes)",
    }
    rows = [
        (f"{400 if cls.status == 409 else cls.status}", f"`{name}`", meanings[name])
        for name, cls in ((c.__name__, c) for c in kinds)
    ]
    rows += [
        ("401", "", "an unknown API key or an expired token"),
        (
            "413",
            "`BodyTooLarge`",
            "the body is too large, possibly only after decompression "
            "or with sparse tensors converted to dense ones",
        ),
        ("408", "", "`/retrieve_future`: the result is not ready; retry"),
        ("410", "", "a request id or session that no longer exists"),
        ("503", "", "a temporary fault of the service; SDKs retry"),
        (
            "200 with `error`",
            "",
            "`/retrieve_future`: the request failed permanently; `category` is `user` or `server`",
        ),
    ]
    return _table(
        'Errors: `{"detail": …, "category": "user" | "server"}`',
        ("status", "kind", "when"),
        sorted(rows),
    )


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return (
        "\n".join([f"\n## {title}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])
        + "\n"
    )


if __name__ == "__main__":
    print(markdown(), end="")
