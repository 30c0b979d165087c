"""What the reference of a job begins with."""

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_actors.config.algorithms import EmaReference, PeriodicReference
from skyrl_actors.config.cluster import ClusterConfig, LoraConfig
from skyrl_actors.config.job import JobConfig
from skyrl_actors.jobs.preferences import DpoJob
from skyrl_actors.jobs.rl_models import RlModels

START = "tinker://start:train:0/weights/given"


class Session:
    async def create(self, role: str, lora: Any, seed: int = 0) -> str:
        return f"base with rank {lora.rank}"

    async def create_from(self, path: str, with_optimizer: bool = False) -> str:
        return path


@pytest.mark.parametrize("reference", [PeriodicReference(), EmaReference()])
@pytest.mark.parametrize(("start", "wanted"), [(START, START), (None, "base with rank 8")])
async def test_a_moving_reference_begins_as_the_policy(
    reference: Any, start: str | None, wanted: str
):
    config: Any = SimpleNamespace(
        init_from=start,
        uses_critic=False,
        needs_reference=True,
        reference=reference,
        lora_rank=8,
        train_attn=True,
        train_mlp=True,
        train_unembed=None,
        seed=0,
    )
    session: Any = Session()
    models = RlModels(config, session, 32.0)
    await models.create(None)
    assert models.policy == models.reference == wanted


@pytest.mark.parametrize(("start", "wanted"), [(START, START), (None, "base with rank 1")])
async def test_preferences_are_compared_with_what_the_policy_began_with(
    start: str | None, wanted: str
):
    job: Any = DpoJob.__new__(DpoJob)
    job.config, job.session = (
        SimpleNamespace(init_from=start, train_attn=True, train_mlp=True),
        Session(),
    )
    await job.prepare()
    assert job._reference == wanted


def test_preferences_after_a_full_fine_tune_need_two_full_models():
    def config(count: int) -> JobConfig:
        cluster = ClusterConfig(critic=None, lora=LoraConfig(max_full_models=count))
        job = {"type": "dpo", "lora_rank": None, "init_from": START, "data": {"path": "x"}}
        return JobConfig.model_validate({"cluster": cluster, "job": job})

    config(2)
    with pytest.raises(ValueError, match=r"set cluster\.lora\.max_full_models to 2"):
        config(1)
