"""Environment variables that the config sets for all ranks and engines."""

import re
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OWN_PREFIX = "SKYRL_ACTORS_"
RESERVED = {
    "CUDA_VISIBLE_DEVICES": "Ray assigns GPUs to actors",
    "GOMP_SPINCOUNT": "it depends on the number of ranks",
    "HF_HUB_OFFLINE": "every folder is resolved before an actor starts",
    "OMP_NUM_THREADS": "set policy.num_threads, critic.num_threads or engine.num_threads",
    "RAY_ADDRESS": "actors belong to the cluster that starts them",
    "VLLM_CPU_OMP_THREADS_BIND": "engines share cores with ranks",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "engines of this service need one value",
    "VLLM_RAY_BUNDLE_INDICES": "the plan assigns bundles",
    "VLLM_RAY_PER_WORKER_GPUS": "the plan assigns GPUs",
}
"""Variables that the service sets itself, each with the reason or the key to use instead."""


def _as_texts(given: Any) -> Any:
    """Turn whole numbers into texts: YAML reads `NCCL_IB_DISABLE: 1` as a number."""
    if not isinstance(given, dict):
        return given
    return {
        key: str(value) if type(value) is int else value
        for key, value in cast("dict[Any, Any]", given).items()
    }


def _checked(given: dict[str, str]) -> dict[str, str]:
    for name, value in given.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        if "\0" in value:
            raise ValueError(f"the value of {name} contains a zero byte")
        reason = RESERVED.get(name)
        if name.startswith(OWN_PREFIX):
            reason = "the service passes its own settings in these"
        if reason is not None:
            raise ValueError(f"{name} is set by the service ({reason}); leave it out")
    return given


EnvironmentVariables = Annotated[
    dict[str, str], BeforeValidator(_as_texts), AfterValidator(_checked)
]
