"""From a model to a layout and a config file: for `serve`, `plan` and `train`.

A layout is chosen for the nodes that are there. Keys in a config file and in overrides are pinned.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from placement.devices import nodes_of
from placement.nodes import nodes_from_cluster_file
from placement.shape import ModelShape
from placement.types import DoesNotFit, Node
from skyrl_actors.backends.memory_demands import INDEX, shape_in
from skyrl_actors.commands.hardware import nodes_here
from skyrl_actors.commands.job_cluster import engine_rank
from skyrl_actors.commands.job_defaults import MAX_TOKENS, RATES, for_real_model
from skyrl_actors.commands.terminal import note
from skyrl_actors.config.job import Job, RlConfig
from skyrl_actors.config.load import raw
from skyrl_actors.config.state_folder import plain_name
from skyrl_actors.config.supervised import RewardModelConfig
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.sizing.candidates import Keys, Needs
from skyrl_actors.sizing.report import GENERATED, lines, yaml_of
from skyrl_actors.sizing.search import Choice, Request, choose

USUAL_RANK = 32
SIZES = ("config.json", INDEX)  # files with the size of a model


def is_config(target: str | Path) -> bool:
    """Return whether a command's argument is a config file; otherwise it is a model."""
    return Path(target).suffix in (".yaml", ".yml")


def refuse_for_config(target: str | Path, **options: object) -> None:
    """Raise ConfigError if options of a model were given with a config file."""
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if is_config(target) and given:
        raise ConfigError(
            f"{', '.join(given)} can only be given with a model, and {target} is a config file; "
            "leave it out, or name a model"
        )


def nodes_for(gpus: str | None, nodes_file: Path | None) -> list[Node]:
    """Return the nodes that were named, or those that are there. Raises ConfigError."""
    try:
        if gpus is not None:
            return nodes_of(gpus)
        return nodes_from_cluster_file(nodes_file) if nodes_file else nodes_here()
    except DoesNotFit as error:
        raise ConfigError(str(error)) from error


def service_request(
    model: str,
    config: Path | None,
    overrides: Sequence[str],
    nodes: Sequence[Node],
    sizes: Path | None = None,
) -> Request:
    """Return the request for a service of this model. What config and overrides set is pinned.

    `sizes` is a folder with the model's config.json, for a model that is not on this machine.
    """
    base, shape = _base_of(model, sizes)
    pinned = raw(config, overrides)
    named = merged_base(base, pinned)
    return Request(base_model=named, shape=shape, nodes=nodes, pinned=_without_base(pinned))


def job_request(
    job_file: Path, model: str, overrides: Sequence[str], nodes: Sequence[Node]
) -> tuple[Request, Keys]:
    """Return the request for a job's cluster, and the job's other keys.

    The file's own `cluster` is not used, because it belongs to another model. Overrides of
    `cluster` are pinned.
    """
    base, shape = _base_of(model)
    keys = raw(job_file, overrides)
    pinned = raw(None, [one for one in overrides if one.startswith("cluster.")]).get("cluster", {})
    rest = {name: value for name, value in keys.items() if name != "cluster"}
    job: Keys = rest.get("job") or {}
    request = Request(
        base_model=merged_base(base, pinned),
        shape=shape,
        nodes=nodes,
        pinned=_with_layout(job, _without_base(pinned)),
        needs=_needs_of(job),
    )
    return request, rest


def merged_base(base: Keys, pinned: Keys) -> Keys:
    """Return the keys of the base model; `path` and `type` are those of the named model."""
    given: Keys = pinned.get("base_model") or {}
    return base | {key: given[key] for key in ("name", "revision") if key in given}


def _without_base(pinned: Keys) -> Keys:
    return {name: value for name, value in pinned.items() if name != "base_model"}


def _with_layout(job: Keys, pinned: Keys) -> Keys:
    """Pin the layout that a job needs which samples while it learns."""
    schedule: Keys = job.get("schedule") or {}
    if schedule.get("type", "on_policy") == "on_policy":
        return pinned
    placement: Keys = pinned.get("placement") or {}
    return pinned | {"placement": {"layout": "split"} | placement}


def _needs_of(keys: Keys) -> Needs:
    try:
        longest = {} if keys.get("type") in RATES else {"max_tokens": MAX_TOKENS}
        job: Any = TypeAdapter(Job).validate_python({"type": "ppo", **longest, **keys})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"job.{place}: {first['msg']}") from None
    critic = job.uses_critic if isinstance(job, RlConfig) else isinstance(job, RewardModelConfig)
    # `train` lowers the rank to the job's own; the file shall also take the usual one.
    rank = engine_rank(max(job.lora_rank or 0, USUAL_RANK))
    return Needs(critic=critic, full_models=job.lora_rank is None, lora_rank=rank)


def _base_of(model: str, sizes: Path | None = None) -> tuple[Keys, ModelShape]:
    """Return the config keys and the shape of a folder, or of a name on the hub."""
    if sizes is not None:
        return {"type": "pretrained", "name": model}, shape_in(sizes)
    folder = Path(model).expanduser()
    if folder.is_dir():
        path = folder.absolute()
        return {"type": "pretrained", "name": path.name, "path": str(path)}, shape_in(path)
    if model.startswith("skyrl-actors/"):
        raise ConfigError(
            f"{model} is made by the service itself; serve it with configs/cpu_tiny.yaml"
        )
    if folder.is_absolute() or model.startswith((".", "~")):
        raise ConfigError(f"{model}: no such folder; give a model's folder or its name on the hub")
    return {"type": "pretrained", "name": model}, shape_in(_sizes_of(model))


def sizes_of(model: Path) -> Path:
    """Return the folder with a model's config.json: of the file, the folder or the hub's name."""
    if model.is_dir() or model.is_file():
        return model if model.is_dir() else model.parent
    if model.suffix == ".json" or model.is_absolute() or str(model).startswith((".", "~")):
        raise ConfigError(f"--model {model}: no such file or folder")
    return _sizes_of(str(model))


def _sizes_of(model: str) -> Path:
    """Fetch the small files that tell a model's size. Return their folder."""
    import huggingface_hub

    hub = cast(Any, huggingface_hub)  # its annotations leave out types
    try:
        found = hub.snapshot_download(model, allow_patterns=list(SIZES))
    except Exception as error:  # noqa: BLE001 (network, names and access: all are the user's)
        raise ConfigError(
            f"{model}: its config.json cannot be fetched "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); "
            "give a local folder, or a name on the Hugging Face hub"
        ) from None
    return Path(found)


def written(request: Request, choice: Choice, rest: Keys, file: Path | None) -> Path:
    """Write the config file of a service, or of a job with the keys in `rest`; return its path.

    Raises ConfigError if the file exists and was not written by this function.
    """
    target = file or Path(_slug(request, rest) + ".yaml")
    if target.exists() and not target.read_text().startswith(GENERATED):
        raise ConfigError(f"{target} exists and was not generated; choose another with --write")
    text = yaml_of(request, choice)
    if rest:
        head = "".join(line + "\n" for line in text.splitlines() if line.startswith("#"))
        keys = OmegaConf.create({"cluster": choice.keys, **rest})
        text = head + OmegaConf.to_yaml(keys)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return target


def _slug(request: Request, rest: Keys) -> str:
    keys: Keys = rest.get("job") or {}
    job = keys.get("type", "job") if rest else "service"
    return f"{plain_name(str(request.base_model['name']).rsplit('/', 1)[-1])}-{job}"


def service_file(
    model: str, config: Path | None, overrides: Sequence[str], file: Path | None
) -> Path:
    """Choose a service's layout, print it, and return the config file that was written."""
    request = service_request(model, config, overrides, nodes_here())
    return _printed(request, choose(request), {}, file)


def job_file(job: Path, model: str, overrides: Sequence[str], file: Path | None) -> Path:
    """Choose the layout of a job's cluster, print it, and return the file that was written."""
    request, rest = job_request(job, model, overrides, nodes_here())
    choice = choose(request)
    return _printed(request, choice, _with_defaults(rest, request.needs, choice), file)


def _with_defaults(rest: Keys, needs: Needs, choice: Choice) -> Keys:
    keys: Keys = rest.get("job") or {}
    is_rl = keys.get("type") not in RATES
    return {**rest, "job": for_real_model(keys, is_rl, bool(needs.critic), choice.config)}


def _printed(request: Request, choice: Choice, rest: Keys, file: Path | None) -> Path:
    for line in lines(request, choice):
        note(line)
    path = written(request, choice, rest, file)
    note(f"wrote {path}; change it and start it again, or pin keys as overrides")
    return path
