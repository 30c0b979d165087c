"""Checkpoints that a job's config names: find them, check them, and link them into the run.

A job reads checkpoints only below its own folder, so it gets links there.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_actors.config.algorithms import CheckpointReference
from skyrl_actors.config.job import JobConfig, RlConfig
from skyrl_actors.config.job_fields import LAYERS
from skyrl_actors.config.supervised import RewardModelConfig
from skyrl_actors.controller.checkpoints import SPEC_FILE, CheckpointFolders
from skyrl_actors.messages.errors import ConfigError, InvalidRequest, NotFound
from skyrl_actors.messages.paths import parse_path

REFERENCE = "tinker://reference:train:0/weights/given"
START = "tinker://start:train:0/weights/given"
FINAL = "checkpoint"  # the last weights in the folder of a run


def given_folders(config: JobConfig) -> dict[str, Path]:
    """Return the folders of the checkpoints that a job needs, by their path in the job.

    Raises:
        ConfigError: A checkpoint does not exist or cannot be used.
    """
    job, found = config.job, dict[str, Path]()
    num_full = int(job.lora_rank is None)
    if job.init_from is not None:
        found[START] = _folder(config, "job.init_from", job.init_from)
        _check_start(config, _spec(found[START]))
    if isinstance(job, RlConfig) and isinstance(job.reference, CheckpointReference):
        found[REFERENCE] = _folder(config, "job.reference.path", job.reference.path)
        num_full += _spec(found[REFERENCE])["lora"] is None
    if num_full > config.cluster.lora.max_full_models:
        raise ConfigError(
            f"policy and reference are {num_full} full fine-tunes; set "
            f"cluster.lora.max_full_models to {num_full} or more"
        )
    return found


def with_links(config: JobConfig) -> JobConfig:
    """Return the config with the paths that the job uses for its checkpoints."""
    job, changed = config.job, dict[str, Any]()
    if job.init_from is not None:
        changed["init_from"] = START
    if isinstance(job, RlConfig) and isinstance(job.reference, CheckpointReference):
        changed["reference"] = job.reference.model_copy(update={"path": REFERENCE})
    return config.model_copy(update={"job": job.model_copy(update=changed)})


def link(given: Mapping[str, Path], checkpoints: Path) -> None:
    """Link checkpoints to their paths in this job's folder of checkpoints."""
    folders = CheckpointFolders(checkpoints)
    for path, checkpoint in given.items():
        place = folders.folder(parse_path(path))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(checkpoint)


def _folder(config: JobConfig, key: str, path: str) -> Path:
    try:
        where = parse_path(path) if path.startswith("tinker://") else None
        found = (
            CheckpointFolders(config.cluster.checkpoint_dir).existing(where)
            if where
            else Path(path).expanduser().resolve()
        )
    except (NotFound, InvalidRequest) as error:
        raise ConfigError(f"{key}: {error} in {config.cluster.checkpoint_dir}") from None
    if (found / FINAL / SPEC_FILE).is_file():  # the folder of a run
        return found / FINAL
    if not (found / SPEC_FILE).is_file():
        raise ConfigError(
            f"{key} {found} is no checkpoint of skyrl-actors, because it has no {SPEC_FILE}"
        )
    return found


def _spec(folder: Path) -> dict[str, Any]:
    return json.loads((folder / SPEC_FILE).read_text())


def _check_start(config: JobConfig, spec: Mapping[str, Any]) -> None:
    """Check that the model of the job can begin with these weights."""
    key, base = f"job.init_from {config.job.init_from}", config.cluster.base_model.name
    role = "critic" if isinstance(config.job, RewardModelConfig) else "policy"
    if spec["role"] != role:
        raise ConfigError(f"{key} is a {spec['role']}; {config.job.type} trains a {role}")
    if spec["base_model"] != base:
        raise ConfigError(f"{key} is of {spec['base_model']}; cluster.base_model is {base}")
    rank = spec["lora"]["rank"] if spec["lora"] else None
    if rank != config.job.lora_rank:
        raise ConfigError(
            f"{key} has "
            + ("full weights" if rank is None else f"an adapter of rank {rank}")
            + f"; set job.lora_rank={'null' if rank is None else rank}"
        )
    for name in LAYERS if spec["lora"] else ():
        wanted, there = getattr(config.job, name), spec["lora"].get(name)
        if wanted is not None and there is not None and wanted != there:
            shown = "with" if there else "without"
            raise ConfigError(f"{key} has an adapter {shown} {name}; set job.{name}={_yaml(there)}")
    own = config.cluster.lora.alpha
    alpha = spec["lora"].get("alpha", own) if spec["lora"] else own
    if alpha != own:
        raise ConfigError(f"{key} has alpha {alpha:g}; set cluster.lora.alpha={alpha:g}")


def _yaml(value: bool) -> str:
    return str(value).lower()
