"""Find or make the folder of a base model, and check it against the config.

A base model is a local folder, a download by name, or a tiny model, which is made once and cached.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from skyrl_actors.backends.kv_cache import too_small
from skyrl_actors.backends.memory_demands import shape_in
from skyrl_actors.backends.weight_files import check_weights
from skyrl_actors.config.base_models import (
    BaseModelConfig,
    PretrainedBase,
    TinyBase,
    TinyMoeBase,
    TinyVlBase,
)
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.messages.errors import ConfigError, InternalError
from skyrl_actors.messages.image_form import VISION
from skyrl_actors.messages.quantization import Quantization, quantization_in

Chat = tuple[str, ...]  # question, answer, and for a model that takes images one in base64
Progress = Callable[[int, int, float], None]  # step, steps, loss
SEED = 0  # of the initial weights and of the warm-up
ROWS_A_STEP = 64
# Files of a model on the hub that nothing here reads: the same weights in other formats.
NOT_NEEDED = ("original/*", "consolidated*", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")
LAYOUT = 1  # increase when the shape of the tiny models or their corpus changes


def base_model_folder(
    base: BaseModelConfig,
    chats: Callable[[int], Iterable[Chat]],
    progress: Progress | None = None,
) -> Path:
    """Return the base model's folder. Raise ConfigError if there is no such model.

    `chats(n)` yields n warm-up chats for a model that is made here.
    """
    if not isinstance(base, PretrainedBase):
        return _made(base, chats, progress)
    if base.path is not None:
        folder = base.path.expanduser().resolve()
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"base_model.path {folder}: no config.json there; give a folder in "
                "Hugging Face format"
            )
        check_weights(folder)
        return folder
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        hub = cast(Any, huggingface_hub)  # its annotations leave out types
        found = hub.snapshot_download(
            base.name, revision=base.revision, ignore_patterns=list(NOT_NEEDED)
        )
        return Path(found)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"base_model.name {base.name!r} cannot be fetched ({error}); set base_model.path to "
            "a local folder"
        ) from error


def check_base(folder: Path, config: ClusterConfig) -> None:
    """Check the model against the config before any process starts.

    Raises ConfigError if the groups cannot hold this model as configured, or if its tokenizer has
    more tokens than the model.
    """
    shape = json.loads((folder / "config.json").read_text())
    _check_quantization(quantization_in(shape, folder.name), folder.name, config)
    if shape.get("model_type") not in VISION:
        _check_no_tower(folder.name, config)
    shape = shape.get("text_config", shape)
    heads, words = shape.get("num_attention_heads"), shape.get("vocab_size")
    for role, group in (("policy", config.policy), ("critic", config.critic)):
        if group is not None and heads and heads % group.sequence_parallel:
            raise ConfigError(
                f"{role}.sequence_parallel {group.sequence_parallel} does not divide the {heads} "
                f"attention heads of {folder.name}"
            )
    if heads and words and (found := too_small(config, shape_in(folder), folder.name)):
        raise ConfigError(found[0])
    if words and (folder / "tokenizer.json").is_file():
        known = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(
            with_added_tokens=True
        )
        if known > words:
            raise ConfigError(
                f"{folder.name}: its tokenizer has {known} tokens and its model {words}; "
                "this tokenizer belongs to another model"
            )


def _check_no_tower(name: str, config: ClusterConfig) -> None:
    """Raise ConfigError if the config trains the tower of a model that has none."""
    for role, group in (("policy", config.policy), ("critic", config.critic)):
        if group is not None and group.train_tower:
            raise ConfigError(
                f"{role}.train_tower=true, but {name} has no vision tower; leave it out"
            )


def _check_quantization(found: Quantization | None, name: str, config: ClusterConfig) -> None:
    """Raise ConfigError if engines with quantized weights would get full weights."""
    if found is None:
        return
    if config.lora.max_full_models:
        raise ConfigError(
            f"{name}: engines keep its {found.method} weights, so they cannot sample from full "
            "fine-tunes; set lora.max_full_models=0, or give a folder with bfloat16 weights"
        )
    if config.engine.sleep_level == "2":
        raise ConfigError(
            f"{name}: engines that wake from sleep level 2 get bfloat16 weights, and its weights "
            f"are {found.method}; set engine.sleep_level=1"
        )


def cache_dir() -> Path:
    """Return the folder that tiny base models are kept in."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(root) / "skyrl-actors").expanduser().resolve()


def _made(
    base: TinyBase | TinyMoeBase | TinyVlBase,
    chats: Callable[[int], Iterable[Chat]],
    progress: Progress | None,
) -> Path:
    rows = list(chats(base.warmup_steps * ROWS_A_STEP))
    digest = hashlib.sha256(
        json.dumps([LAYOUT, SEED, base.warmup_steps, rows]).encode()
    ).hexdigest()[:12]
    folder = cache_dir() / f"{base.type.replace('_', '-')}-{digest}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as file:
        names = ("question", "answer", "image")
        file.writelines(json.dumps(dict(zip(names, row, strict=False))) + "\n" for row in rows)
    command = [sys.executable, "-m", "skyrl_actors.workers.tiny_base", str(folder), file.name]
    command += ["--steps", str(base.warmup_steps), "--seed", str(SEED), "--kind", base.type]
    try:
        _run(command, progress)
    finally:
        os.unlink(file.name)
    return folder


def _run(command: list[str], progress: Progress | None) -> None:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_WAIT_POLICY": "passive",
    }
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if progress and line.startswith("{"):
                    note = json.loads(line)
                    progress(note["step"], note["steps"], note["loss"])
        finally:
            if process.poll() is None:
                process.terminate()
        if process.wait() != 0:
            errors.seek(0)
            raise InternalError(f"making the base model failed:\n{errors.read()[-2000:]}")
