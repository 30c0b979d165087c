"""The configs of shards, and whether they fit the nodes."""

from pathlib import Path

import pytest

from placement.types import Node
from skyrl_actors.backends.demands import shard_plans, whole_plan, with_host_shares
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.journal import JournalConfig
from skyrl_actors.config.load import load, to_yaml
from skyrl_actors.config.shard_configs import keeper, shard_configs, shard_name, shard_number
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.paths import shard_mark, shard_of

GIB = 2**30


def config(count: int, **parts: object) -> ClusterConfig:
    return ClusterConfig.model_validate({"shards": {"count": count}, **parts})


def node(name: str, cpus: int) -> Node:
    return Node(name=name, cpus=cpus, gpus=0, host_bytes=8 * GIB)


def test_the_first_shard_is_the_service_itself():
    whole = config(3, name="tinker")
    first, second, third = shard_configs(whole)
    assert first is whole
    assert [second.name, third.name] == ["tinker.2", "tinker.3"]
    assert second.journal.folder == whole.journal.folder.with_name("journal_2")
    assert second.checkpoint_dir == whole.checkpoint_dir


def test_each_shard_has_a_database_and_a_mirror_of_its_own():
    journal = JournalConfig(
        folder=Path("/j"), url="postgresql://a:b@host:5/db?sslmode=require", mirror="s3://bucket/j/"
    )
    second = shard_configs(config(2, journal=journal))[1].journal
    assert second.url == "postgresql://a:b@host:5/db_2?sslmode=require"
    assert second.mirror == "s3://bucket/j_2"
    assert second.folder == Path("/j_2")


@pytest.mark.parametrize(
    ("url", "second"),
    [
        ("postgresql:///db?host=/var/run", "postgresql:///db_2?host=/var/run"),
        ("postgresql://u:p#x?y/z@h:5/db", "postgresql://u:p#x?y/z@h:5/db_2"),
        ("postgres://h/db", "postgres://h/db_2"),
    ],
)
def test_only_the_name_of_the_database_changes(url: str, second: str):
    assert JournalConfig(url=url).of_shard(2).url == second


def test_a_url_without_a_database_is_refused():
    with pytest.raises(ValueError, match="names no database"):
        config(2, journal={"url": "postgresql://user@host"})


@pytest.mark.parametrize("number", [1, 2, 17, 64])
def test_a_name_and_an_id_tell_the_number(number: int):
    name = shard_name("tinker-2", number)
    assert shard_number(name) == shard_number(f"{name}:label") == number
    for kind in ("s", "r", "direct"):
        assert shard_of(f"{kind}{shard_mark(number)}0123:train:4") == number


@pytest.mark.parametrize("text", ["s0123456789abcdef", "r77", "s12k01234567", "direct-12", "s0-1"])
def test_other_ids_belong_to_the_first_shard(text: str):
    assert shard_of(text) == 1


def test_several_base_models_can_be_served_by_each_shard():
    whole = load("configs/cpu_catalogue.yaml", ["shards.count=2"])
    names = [[own.name for own in shard.served().values()] for shard in shard_configs(whole)]
    assert [shard_number(name) for name in names[1]] == [2] * len(names[1])
    assert not set(names[0]) & set(names[1])


def test_each_id_is_cleaned_up_by_one_shard():
    keepers = [keeper(own) for own in shard_configs(config(2))]
    for text, owner in (("s0123_train_0", 1), ("s2-0123_train_0", 2), ("s3-0123_train_0", 1)):
        assert [keeps(text) for keeps in keepers] == [owner == 1, owner == 2]


def test_shards_that_do_not_fit_are_refused_with_their_number():
    assert len(shard_plans(config(2), [node("a", 2)])) == 2
    with pytest.raises(ConfigError, match="shard 3 of 3 does not fit what the others leave"):
        shard_plans(config(3), [node("a", 2)])


def test_a_lost_node_keeps_no_shard_from_its_own():
    first, second = shard_configs(config(2))
    nodes = [node("a", 1), node("b", 1)]
    places = [slot.node for own in (first, second) for slot in whole_plan(own, nodes).slots]
    assert sorted(places) == ["a", "b"]
    for own in (first, second):
        assert [slot.node for slot in whole_plan(own, nodes[:1]).slots] == ["a"]
        assert [one.host_bytes for one in with_host_shares(own, nodes[:1])] == [4 * GIB]


def test_a_service_of_a_version_without_shards_has_the_same_config():
    assert "shards" not in to_yaml(config(1)) and "shards" in to_yaml(config(2))


def test_shards_on_one_node_divide_its_host_memory():
    shared = with_host_shares(config(2), [node("a", 2)])
    assert [one.host_bytes for one in shared] == [4 * GIB]
    apart = with_host_shares(config(2), [node("a", 1), node("b", 1)])
    assert [one.host_bytes for one in apart] == [8 * GIB] * 2


def test_a_job_has_one_controller():
    with pytest.raises(ConfigError, match="a job has one controller"):
        load("configs/jobs/ppo_tiny.yaml", ["cluster.shards.count=2"], JobConfig)
