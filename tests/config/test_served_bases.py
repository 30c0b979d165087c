"""The configs of several base models: what they share, what differs, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.config.base_configs import BaseConfigs
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import load, raw, to_yaml
from skyrl_actors.messages.errors import ConfigError

CATALOGUE = Path("configs/cpu_catalogue.yaml")


def bases(**labels: dict[str, Any]) -> dict[str, Any]:
    tiny = {"type": "tiny"}
    return {"base_models": {k: {"base_model": {**tiny, "name": k}, **v} for k, v in labels.items()}}


def test_one_base_model_is_served_with_the_config_itself():
    config = ClusterConfig()
    assert config.served() == {"skyrl-actors/tiny": config}


def test_each_base_model_has_the_common_sections_and_its_own():
    config = ClusterConfig.model_validate(
        {
            "name": "svc",
            "engine": {"max_model_len": 256, "max_num_seqs": 7},
            "critic": {"num_threads": 3},
            **bases(
                a={"engine": {"max_model_len": 128}, "critic": None},
                b={"critic": {"num_threads": 2}, "transfer": {"type": "disk", "folder": "/x"}},
            ),
        }
    )
    a, b = config.served().values()
    assert (a.engine.max_model_len, a.engine.max_num_seqs, a.critic) == (128, 7, None)
    assert (b.engine.max_model_len, b.critic and b.critic.num_threads) == (256, 2)
    assert (a.name, b.name) == ("svc:a", "svc:b") and not a.base_models
    assert b.transfer.folder == Path("/x/svc") and b.transfer.type == "disk"
    configs = BaseConfigs(config)
    assert list(configs) == ["a", "b"] and configs.default == a
    assert configs.of("b") == b and configs.of("") == configs.of("unknown") == a


def test_a_section_of_another_type_replaces_the_common_one():
    common = {"transfer": {"type": "gloo", "bucket_bytes": 2**20}}
    config = ClusterConfig.model_validate(
        {**common, **bases(a={}, b={"transfer": {"type": "shm"}})}
    )
    a, b = config.served().values()
    assert (a.transfer.type, b.transfer.type) == ("gloo", "shm")


def test_a_repeated_type_keeps_the_common_keys_of_its_section():
    common = {"engine": {"max_num_seqs": 7}, "transfer": {"type": "disk", "folder": "/x"}}
    own = {
        "engine": {"type": "vllm", "max_loras": 2},
        "transfer": {"type": "disk", "checksums": True},
    }
    (a,) = ClusterConfig.model_validate({**common, **bases(a=own)}).served().values()
    assert (a.engine.max_num_seqs, a.engine.max_loras) == (7, 2)
    assert a.transfer.folder == Path("/x/skyrl-actors") and a.transfer.checksums


def test_a_resolved_catalogue_reads_back_equal(tmp_path: Path):
    config = load(CATALOGUE, ["policy.num_threads=1"])
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    again = load(tmp_path / "resolved.yaml")
    assert again == config and again.served() == config.served()


def test_a_config_of_an_earlier_version_equals_one_with_one_base_model():
    """Otherwise its service could not be upgraded, nor its runs be resumed."""
    job = load("configs/jobs/grpo_tiny.yaml", (), JobConfig)
    for written in (to_yaml(ClusterConfig()), to_yaml(job)):
        assert "base_models" not in written and "parking" not in written
        assert "base_model:" in written


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("base_models.mixture.http.port=1", "base_models.mixture.http: a base model cannot have"),
        ("base_models.images.engine.foo=1", "base_models.images.engine.foo: "),
        ("base_models.tiny.policy.num_ranks=2", "policy.num_ranks is 2 and engine.num_engines"),
        ("base_models.Big.base_model.type=tiny", "a label has 1 to 21 small letters"),
        ("base_models.fourth.critic=null", "base_models.fourth.base_model is missing"),
        ("base_models.images.base_model.name=skyrl-actors/tiny", "each needs its own"),
        ("base_model.type=tiny", "put base_model among base_models"),
        ("base_model.type=tiny_vl", "put base_model among base_models"),
        ("placement.layout=split", "share the devices"),
        ("parking.max_loaded=0", "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_key(override: str, said: str):
    with pytest.raises(ConfigError) as refused:
        load(CATALOGUE, [override])
    assert said in str(refused.value)


def test_base_models_need_the_same_devices_and_memory_that_can_leave_them():
    two: dict[str, Any] = {"policy": {"num_ranks": 2}, "critic": None, "engine": {"num_engines": 2}}
    with pytest.raises(ValueError, match="a has 2, b has 1"):
        ClusterConfig.model_validate(bases(a=two, b={}))
    gpu = {"placement": {"device": "gpu"}, "lora": {"max_full_models": 0}, "critic": None}
    jax = {"policy": {"strategy": {"type": "jax"}}, "engine": {"type": "jax", "process": "policy"}}
    with pytest.raises(ValueError, match="keeps its GPU memory, so it cannot be parked"):
        ClusterConfig.model_validate({**gpu, **bases(a={}, b=jax)})


def test_parking_needs_several_base_models_and_jobs_train_one():
    with pytest.raises(ValueError, match="applies to several base models"):
        ClusterConfig.model_validate({"parking": {"max_resident": 1}})
    plain = raw("configs/jobs/grpo_tiny.yaml", ())
    del plain["cluster"]["base_model"]
    plain["cluster"] |= bases(a={})
    with pytest.raises(ValueError, match="a job trains one base model"):
        JobConfig.model_validate(plain)


def test_the_edge_takes_as_many_samples_as_any_base_model_runs():
    config = load(
        CATALOGUE,
        ["base_models.tiny.engine.max_num_seqs=2048", "limits.samples_in_flight=null"],
    )
    configs = BaseConfigs(config)
    assert configs.samples_in_flight == 2048
    assert {configs.of(name).samples_in_flight for name in configs} == {2048, 512}
