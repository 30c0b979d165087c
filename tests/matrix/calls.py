"""Make every public call of the installed tinker SDK, and print one JSON object.

The service is that of TINKER_BASE_URL. This module imports only the SDK and the standard library,
so it runs in environments of all versions.
"""

import io
import json
import pickle
import struct
import sys
import tarfile
import traceback
import urllib.request
import warnings
import zlib
from collections.abc import Callable
from typing import Any

warnings.simplefilter("ignore")
import tinker  # noqa: E402
from tinker import types  # noqa: E402

MODEL, TAKES_IMAGES = sys.argv[1], "--images" in sys.argv
TOKENS = [5, 6, 7, 8]
ABSENT = "absent"


class Absent(Exception):
    """This version of the SDK has no such call."""


def tensor(values: list[float], dtype: str = "float32") -> Any:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])


def wide_datum(k: int) -> Any:
    """K targets for each token, as distillation sends them."""
    inputs = {
        "target_tokens": types.TensorData(data=list(range(4 * k)), dtype="int64", shape=[4, k]),
        "weights": types.TensorData(data=[0.5] * (4 * k), dtype="float32", shape=[4, k]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)


def datum(**fields: list[float]) -> Any:
    inputs = {name: tensor(values) for name, values in fields.items()}
    inputs["target_tokens"] = tensor([6, 7, 8, 9], "int64")
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)


def has(thing: Any, name: str) -> Any:
    if not hasattr(thing, name):
        raise Absent(name)
    return getattr(thing, name)


class Calls:
    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.kept: dict[str, Any] = {}

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            result = call()
            self.outcomes[name] = "ok"
            return result
        except Absent:
            self.outcomes[name] = ABSENT
        except (Exception, SystemExit) as error:  # noqa: BLE001  it is the outcome of the call
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.outcomes[name] = f"{type(error).__name__}: {str(error)[:160]} ({last.name})"
        return None


def is_since(version: str, needed: tuple[int, ...]) -> bool:
    return tuple(int(part) for part in version.split(".")[:2]) >= needed


def supported(version: str, needed: tuple[int, ...]) -> None:
    if not is_since(version, needed):
        raise Absent(str(needed))


def training(calls: Calls, service: Any, version: str) -> Any:
    model = calls.run(
        "create_lora_training_client",
        lambda: service.create_lora_training_client(base_model=MODEL, rank=4),
    )
    if model is None:
        return None
    calls.run("get_info", lambda: model.get_info())
    weights, rl = [1.0] * 4, {"logprobs": [-1.0] * 4, "advantages": [0.5] * 4}

    def forward_backward(
        loss: str, config: dict[str, float] | None = None, **fields: list[float]
    ) -> Any:
        options = {"loss_fn_config": config} if config else {}
        result = model.forward_backward([datum(**fields)], loss, **options).result()
        assert "loss:sum" in result.metrics and len(result.loss_fn_outputs) == 1, result
        assert len(result.loss_fn_outputs[0]["logprobs"].data) == 4
        return result

    calls.run(
        "forward_backward cross_entropy", lambda: forward_backward("cross_entropy", weights=weights)
    )
    calls.run(
        "forward_backward importance_sampling",
        lambda: forward_backward("importance_sampling", **rl),
    )
    for since, loss, config in (
        ((0, 7), "ppo", {"clip_low_threshold": 0.9}),
        ((0, 7), "cispo", {"clip_high_threshold": 3.0}),
        ((0, 7), "dro", {"beta": 0.1}),
    ):
        calls.run(
            f"forward_backward {loss}",
            lambda s=since, n=loss, c=config: (supported(version, s), forward_backward(n, c, **rl)),
        )
    calls.run(
        "forward_backward gspo",
        lambda: (
            supported(version, (0, 34)),
            forward_backward("gspo", None, sequence_ratio_mask=weights, **rl),
        ),
    )
    calls.run(
        "forward_backward (N, K)",
        lambda: (
            supported(version, (0, 6)),
            model.forward_backward(
                [wide_datum(3), wide_datum(2 if is_since(version, (0, 24)) else 3)], "cross_entropy"
            )
            .result()
            .loss_fn_outputs[1]["logprobs"]
            .data[7],
        ),
    )
    calls.run("forward", lambda: model.forward([datum(weights=weights)], "cross_entropy").result())
    calls.run("optim_step", lambda: model.optim_step(types.AdamParams(learning_rate=1e-4)).result())
    calls.run(
        "3 chunks",
        lambda: model.forward_backward(
            [datum(weights=weights) for _ in range(300)], "cross_entropy"
        ).result(),
    )
    return model


def traced_loss(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/mine:mean": loss}


def custom_loss(data: Any, logprobs: Any) -> Any:
    loss = sum(value.sum() for value in logprobs)
    return loss, {"mean": float(loss)}


def saving(calls: Calls, service: Any, model: Any, version: str) -> None:
    saved = calls.run("save_state", lambda: model.save_state("one").result().path)
    sampler = calls.run(
        "save_weights_for_sampler", lambda: model.save_weights_for_sampler("two").result().path
    )
    calls.kept |= {"state": saved, "sampler": sampler}
    calls.run("load_state", lambda: model.load_state(saved).result())
    calls.run(
        "load_state_with_optimizer", lambda: has(model, "load_state_with_optimizer")(saved).result()
    )
    calls.run(
        "create_training_client_from_state",
        lambda: has(service, "create_training_client_from_state")(saved),
    )
    calls.run(
        "create_training_client_from_state_with_optimizer",
        lambda: has(service, "create_training_client_from_state_with_optimizer")(saved),
    )
    exported = calls.run(
        "save_weights_external", lambda: has(model, "save_weights_external")("out").result().path
    )
    calls.kept["external"] = exported
    calls.run("copy_weights", lambda: has(service, "copy_weights")(saved).result())
    calls.run(
        "save_state ttl",
        lambda: (supported(version, (0, 9)), model.save_state("brief", ttl_seconds=3600).result()),
    )


def ready(found: Any) -> Any:
    return found.result() if hasattr(found, "result") else found


def sampling(calls: Calls, service: Any, model: Any, version: str) -> None:
    prompt = types.ModelInput.from_ints(TOKENS)
    params = types.SamplingParams(max_tokens=3, temperature=1.0, seed=1)

    def sample(client: Any, **options: Any) -> Any:
        answer = client.sample(
            prompt=prompt, sampling_params=params, **{"num_samples": 2, **options}
        ).result()
        assert len(answer.sequences) == 2 and len(answer.sequences[0].tokens) == 3, answer
        return answer

    ephemeral = calls.run(
        "save_weights_and_get_sampling_client",
        lambda: ready(model.save_weights_and_get_sampling_client("x")),
    )
    if ephemeral is not None:
        calls.run("sample", lambda: sample(ephemeral))
        calls.run(
            "sample prompt_logprobs",
            lambda: sample(ephemeral, include_prompt_logprobs=True).prompt_logprobs[3] + 1,
        )
        calls.run("compute_logprobs", lambda: ephemeral.compute_logprobs(prompt).result())
        calls.run(
            "sample topk_prompt_logprobs",
            lambda: (
                supported(version, (0, 6)),
                sample(ephemeral, include_prompt_logprobs=True, topk_prompt_logprobs=2),
            ),
        )
        calls.run(
            "sample topk_sample_logprobs",
            lambda: (supported(version, (0, 29)), sample(ephemeral, topk_sample_logprobs=2)),
        )
        calls.run(
            "sample target_prompt_logprobs",
            lambda: (
                supported(version, (0, 30)),
                sample(
                    ephemeral,
                    target_prompt_logprobs=types.TensorData(
                        data=[1, -1, 2, 3, 4, 5], dtype="int64", shape=[3, 2]
                    ),
                ).target_prompt_logprobs.data[5],
            ),
        )
        calls.run(
            "sample prompt_alt_tokens_k",
            lambda: (
                supported(version, (0, 31)),
                sample(ephemeral, prompt_alt_tokens_k=2).prompt_alt_tokens.tokens.shape == [3, 2]
                or 1 / 0,
            ),
        )
        calls.run(
            "sample prompt_logprobs_last_n",
            lambda: (
                supported(version, (0, 33)),
                sample(ephemeral, include_prompt_logprobs=True, prompt_logprobs_last_n=2),
            ),
        )
        calls.run(
            "pickled sampling client",
            lambda: (supported(version, (0, 12)), sample(pickle.loads(pickle.dumps(ephemeral)))),
        )
    base = calls.run(
        "create_sampling_client base_model",
        lambda: service.create_sampling_client(base_model=MODEL),
    )
    if base is not None:
        calls.run("sample base model", lambda: sample(base))
    path = calls.kept.get("sampler")
    saved = calls.run(
        "create_sampling_client model_path", lambda: service.create_sampling_client(model_path=path)
    )
    if saved is not None:
        calls.run("sample saved weights", lambda: sample(saved))


def archived(client: Any, path: str) -> None:
    """Check that the link in the answer points to a tar with the checkpoint's files."""
    url = has(client, "get_checkpoint_archive_url_from_tinker_path")(path).result().url
    with (
        urllib.request.urlopen(url) as answer,
        tarfile.open(fileobj=io.BytesIO(answer.read())) as members,
    ):
        assert "model_spec.json" in members.getnames(), members.getnames()


def downloaded(client: Any, path: str) -> None:
    urls = has(client, "get_external_weights_urls")(path).result().urls
    for url in urls.values():
        with urllib.request.urlopen(url) as answer:
            assert answer.read()
    assert urls


def rest(calls: Calls, service: Any, model: Any, version: str) -> None:
    client = calls.run("create_rest_client", lambda: has(service, "create_rest_client")())
    if client is None:
        return
    run_id, state = model.model_id, calls.kept["state"]
    calls.run(
        "list_training_runs", lambda: has(client, "list_training_runs")().result().training_runs[0]
    )
    calls.run(
        "get_training_run", lambda: has(client, "get_training_run")(run_id).result().training_run_id
    )
    calls.run(
        "list_checkpoints", lambda: has(client, "list_checkpoints")(run_id).result().checkpoints[0]
    )
    calls.run(
        "list_user_checkpoints",
        lambda: has(client, "list_user_checkpoints")().result().checkpoints[0],
    )
    calls.run(
        "get_weights_info_by_tinker_path",
        lambda: has(client, "get_weights_info_by_tinker_path")(state).result(),
    )
    calls.run("publish", lambda: has(client, "publish_checkpoint_from_tinker_path")(state).result())
    calls.run(
        "unpublish", lambda: has(client, "unpublish_checkpoint_from_tinker_path")(state).result()
    )
    calls.run(
        "set_ttl", lambda: has(client, "set_checkpoint_ttl_from_tinker_path")(state, 7200).result()
    )
    calls.run("get_checkpoint_archive_url", lambda: archived(client, state))
    calls.run("list_sessions", lambda: has(client, "list_sessions")().result().sessions[0])
    session_id = run_id.split(":")[0]
    calls.run("get_session", lambda: has(client, "get_session")(session_id).result())
    calls.run(
        "search_sessions",
        lambda: (
            has(client, "search_sessions")(types.SessionSearchRequest(session_id=session_id))
            .result()
            .sessions[0]
            .checkpoints_count
            + 1
        ),
    )
    calls.run("get_external_weights_urls", lambda: downloaded(client, calls.kept["external"]))
    calls.run("rest copy_weights", lambda: has(client, "copy_weights")(state, "project").result())
    calls.run("get_sampler", lambda: has(client, "get_sampler")(f"{session_id}:sample:0").result())
    calls.run(
        "delete_checkpoint",
        lambda: has(client, "delete_checkpoint_from_tinker_path")(state).result(),
    )


def image_chunk() -> Any:
    """Return an image of 32 x 32 pixels, as this version describes one."""

    def part(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", 32, 32, 8, 2, 0, 0, 0)
    lines = b"".join(b"\0" + bytes([8 * y % 256, 90, 200]) * 32 for y in range(32))
    png = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(lines))
    png += part(b"IEND", b"")
    fields = getattr(has(types, "ImageChunk"), "model_fields", {})
    if "tokens" in fields:
        size: Any = {"height": 32, "width": 32, "tokens": 4}
    else:
        size = {"expected_tokens": 4}
    return types.ImageChunk(data=png, format="png", **size)


def images(calls: Calls, model: Any, version: str) -> None:
    def chunks() -> Any:
        text = types.EncodedTextChunk(tokens=TOKENS)
        return types.ModelInput(chunks=[text, image_chunk(), text])

    def image_datum() -> Any:
        inputs = {"target_tokens": tensor([0] * 8 + TOKENS, "int64")}
        inputs["weights"] = tensor([0.0] * 8 + [1.0] * 4)
        return types.Datum(model_input=chunks(), loss_fn_inputs=inputs)

    def trained() -> None:
        result = model.forward_backward([image_datum()], "cross_entropy").result()
        assert len(result.loss_fn_outputs[0]["logprobs"].data) == 12

    calls.run("image forward_backward", trained)
    calls.run("image forward", lambda: model.forward([image_datum()], "cross_entropy").result())
    calls.run(
        "image forward_backward_custom",
        lambda: (
            has(model, "forward_backward_custom"),
            model.forward_backward_custom([image_datum()], custom_loss).result(),
        ),
    )
    client = calls.run(
        "image sampler", lambda: ready(model.save_weights_and_get_sampling_client("i"))
    )
    if client is None:
        return
    params = types.SamplingParams(max_tokens=3, temperature=1.0, seed=1)

    def sampled() -> None:
        answer = client.sample(prompt=chunks(), sampling_params=params, num_samples=2).result()
        assert len(answer.sequences) == 2

    def scored() -> None:
        found = client.compute_logprobs(chunks()).result()
        assert len(found) == 12 and found[1] < 0 and found[11] < 0, found

    calls.run("image sample", sampled)
    calls.run("image compute_logprobs", scored)


def main() -> None:
    from importlib.metadata import version as version_of

    version, calls = version_of("tinker"), Calls()
    service = calls.run("ServiceClient", lambda: tinker.ServiceClient())
    calls.run("get_server_capabilities", lambda: service.get_server_capabilities())
    model = training(calls, service, version)
    if model is not None:
        saving(calls, service, model, version)
        sampling(calls, service, model, version)
        rest(calls, service, model, version)
        calls.run(
            "forward_backward_custom",
            lambda: (
                has(model, "forward_backward_custom"),
                model.forward_backward_custom([datum(weights=[1.0] * 4)], custom_loss).result(),
            ),
        )
        calls.run(
            "create_custom_loss",
            lambda: model.forward_backward_custom(
                [datum(weights=[1.0] * 4)],
                has(service, "create_custom_loss")(
                    traced_loss, input_ranks={"logprobs": 1, "weights": 1}
                ).result(),
            ).result(),
        )
        if TAKES_IMAGES:
            images(calls, model, version)
    calls.run("close", lambda: has(service, "close")("success"))
    print("\n" + json.dumps({"version": version, "calls": calls.outcomes}))


if __name__ == "__main__":
    main()
