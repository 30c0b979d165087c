"""An engine in the process of a JAX rank: shared weights, versions, sleep, training meanwhile."""

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

from skyrl_actors import losses
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.strategies import JaxStrategy
from skyrl_actors.engines import rank_with_engine as module
from skyrl_actors.engines.engine_site import RankSite
from skyrl_actors.engines.interface import BASE_VERSION
from skyrl_actors.engines.rank_with_engine import RankWithEngine
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import InternalError, PartDown
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.weights import WeightManifest
from skyrl_actors.transfer.folders import full_manifests
from skyrl_actors.workers.interface import PartCall, WorkerSpec
from tests.engines.test_jax_engine import PROMPT, SCORE, close, spec_of

CROSS_ENTROPY = losses.find("cross_entropy").checked({})


def rank_spec(base: Path, **options: Any) -> WorkerSpec:
    return WorkerSpec(
        role="policy",
        rank=0,
        world_size=1,
        base_folder=str(base),
        dtype="float32",
        device="cpu",
        num_threads=1,
        microbatch_tokens=512,
        collective_timeout_s=60.0,
        strategy=JaxStrategy(prepare_s=0),
        **{"preload": False, "hosts_engine": True} | options,
    )


class Rank(RankWithEngine):
    """A rank with its engine in this process, without Ray, that trains on the prompt."""

    def __init__(self, base: Path, folder: Path):
        super().__init__(None)
        self.become(rank_spec(base))
        self.call(0, "setup", "127.0.0.1", 0)
        self._folder = folder
        tokens = np.asarray(PROMPT, np.int32)
        self._row = columns_from([Example(tokens[:-1], {TARGETS: tokens[1:]})])

    @property
    def network(self) -> Any:
        worker: Any = self.worker
        return worker.model_factory.base

    def _pass(self, name: str, forward_only: bool) -> Any:
        call = PartCall(model_id=name, rows=(0,), columns=self._row, loss=CROSS_ENTROPY)
        return self.worker.forward_backward((call,), forward_only)[0]

    def logprobs(self, name: str) -> np.ndarray:
        return self._pass(name, True).values

    def trained(self, name: str, lora: LoraSpec | None) -> WeightManifest:
        """Train a new model for a step and export it."""
        self.worker.create_model(ModelSpec(model_id=name, base_model="tiny", lora=lora))
        self._pass(name, False)
        self.worker.optim_step(name, AdamParams(learning_rate=0.01))
        made = self.worker.export_weights(name, str(self._folder / name), f"{name}@1", True)
        assert made is not None
        return made

    def scores(self, version: str, adapter: WeightManifest | None = None) -> np.ndarray:
        return self.engine("sample", 1, version, PROMPT, SCORE, adapter, version).prompt_logprobs[
            1:
        ]


@pytest.fixture
def rank(random_base: Path, tmp_path: Path) -> Iterator[Rank]:
    made = Rank(random_base, tmp_path)
    made.host(spec_of(random_base))
    made.engine("adopt", 1)
    made.engine("start", 1)
    yield made
    assert made.hosted is not None
    made.hosted.close()


def pointers(base: Any) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(base)]


@pytest.mark.slow
def test_an_engine_samples_with_the_arrays_of_its_rank(rank: Rank, random_base: Path):
    engine_network = rank.hosted._server.engine._network  # type: ignore[union-attr]
    own = pointers(rank.network.base)
    assert pointers(engine_network.base) == own
    adapter = rank.trained("a", LoraSpec(rank=4))
    before = rank.logprobs("a")
    base = rank.scores(BASE_VERSION)
    assert close(rank.scores("a@1", adapter), before) and not close(base, before)
    full = rank.trained("full", None)
    rank.engine("load_full", 1, "full@1", (full,))
    assert pointers(engine_network.base) != own  # a full fine-tune is a copy
    assert close(rank.scores("full@1"), rank.logprobs("full"))
    freed = rank.engine("sleep", 1, 2)
    assert freed > sum(x.nbytes for x in jax.tree.leaves(rank.network.base))
    assert (rank.logprobs("a") == before).all()
    for tag in ("weights", "kv_cache"):
        rank.engine("wake", 1, tag)
    rank.engine("load_full", 1, BASE_VERSION, full_manifests(random_base, BASE_VERSION))
    assert pointers(engine_network.base) == own and (rank.scores(BASE_VERSION) == base).all()
    assert rank.engine("sleep", 1, 2) < freed  # the cache only: the weights are the rank's
    assert (rank.logprobs("a") == before).all()
    assert rank.engine("status").rss_bytes == 0


@pytest.mark.slow
def test_a_rank_trains_while_its_engine_samples(rank: Rank):
    """Both give the bits that they give alone."""
    how = SamplingParams(max_tokens=30, seed=1, num_samples=4, stop=())

    def drawn() -> list[Any]:
        found = rank.engine("sample", 1, "r", PROMPT, how, None, BASE_VERSION)
        return [each.tokens.tolist() for each in found.sequences]

    alone = drawn()
    rank.trained("alone", LoraSpec(rank=4))
    wanted = rank.logprobs("alone")
    assert rank.hosted is not None
    server, loop = rank.hosted._server, rank.hosted._loop
    running = [
        asyncio.run_coroutine_threadsafe(
            server.sample(1, f"r{n}", PROMPT, how, None, BASE_VERSION), loop
        )
        for n in range(4)
    ]
    rank.worker.delete_model("alone")
    rank.trained("alone", LoraSpec(rank=4))
    assert (rank.logprobs("alone") == wanted).all()
    for each in running:
        assert [one.tokens.tolist() for one in each.result(60).sequences] == alone


@pytest.mark.slow
def test_a_second_engine_in_a_rank_replaces_the_first(rank: Rank, random_base: Path):
    first = rank.hosted
    rank.host(spec_of(random_base, max_num_seqs=2))
    assert rank.hosted is not first and first is not None and not first._thread.is_alive()
    report = rank.engine("adopt", 2)
    assert not report.ready and report.spec.max_num_seqs == 2
    rank.engine("start", 2)
    with pytest.raises(InternalError, match="epoch 1 is over"):
        rank.scores(BASE_VERSION)


@pytest.mark.slow
def test_an_engine_that_is_replaced_frees_its_memory_and_ends_its_calls(
    rank: Rank, random_base: Path
):

    def watch() -> None:
        with suppress(CancelledError):
            rank.engine("watch")

    watching = threading.Thread(target=watch)
    watching.start()
    gone = weakref.ref(rank.hosted._server.engine)  # type: ignore[union-attr]
    rank.host(spec_of(random_base))
    watching.join(30)
    assert not watching.is_alive()
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_a_controller_that_attaches_ends_the_watch_of_the_one_before(rank: Rank):
    """Each watch takes a thread of the actor, which has few."""
    watches = list[threading.Thread]()
    for epoch in range(2, 6):
        rank.engine("adopt", epoch)
        watches.append(threading.Thread(target=lambda: rank.engine("watch"), daemon=True))
        watches[-1].start()
    for watch in watches[:-1]:
        watch.join(30)
    assert [watch.is_alive() for watch in watches] == [False, False, False, True]
    rank.engine("adopt", 9)


@pytest.mark.slow
def test_an_engine_that_does_not_end_is_named_and_left(
    rank: Rank, random_base: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "STOP_S", 0.2)
    hanging: Any = rank.hosted
    stops = hanging._server.engine.stop
    hanging._server.engine.stop = lambda: asyncio.sleep(60)
    with pytest.raises(InternalError, match=r"did not end within 0\.2 s"):
        rank.host(spec_of(random_base))
    assert rank.hosted is None
    monkeypatch.undo()
    rank.host(spec_of(random_base))
    hanging._server.engine.stop = stops
    hanging.close()


async def test_an_engine_does_not_wait_for_a_group_that_is_down(random_base: Path):
    """It holds a phase that the group needs."""
    policy: Any = SimpleNamespace(group=object(), down="it died", name="the policy group")
    site = RankSite(spec=spec_of(random_base), rank=0, policy=policy, timeout_s=1.0)
    with pytest.raises(PartDown, match="the policy group is down: it died"):
        await site.make()
    said = list[str]()
    policy.restart_now = said.append
    site.failed("JAX failed")
    assert said == ["e, which it hosts, did not start: JAX failed"]


def test_a_rank_that_was_not_made_for_an_engine_hosts_none(random_base: Path):
    plain = RankWithEngine(None)
    with pytest.raises(InternalError, match="standby hosts no engine"):
        plain.engine("status")
    plain.spec = replace(rank_spec(random_base), hosts_engine=False)
    with pytest.raises(InternalError, match="was not made to host an engine"):
        plain.host(spec_of(random_base))


JAX = {"strategy": {"type": "jax"}}
HOSTED = {
    "policy": JAX,
    "critic": JAX,
    "engine": {"type": "jax", "process": "policy"},
    "transfer": {"type": "shm"},
}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": {}}, r"policy\.strategy of type jax"),
        (
            {
                "policy": {"num_ranks": 2, "strategy": {"type": "jax", "fsdp": 2}},
                "engine": HOSTED["engine"] | {"num_engines": 2},
                "critic": None,
            },
            "fsdp=1 and tensor=1",
        ),
        ({"placement": {"layout": "split"}}, "layout colocated or mixed"),
        ({"policy": JAX | {"dtype": "bfloat16"}}, r"engine\.dtype bfloat16"),
        ({"policy": JAX | {"num_threads": 2}}, r"engine\.num_threads 2 as policy\.num_threads"),
        ({"engine": {"process": "policy"}}, r"engine\.process policy is of engine\.type jax"),
        ({"placement": {"device": "gpu"}}, "keeps its GPU memory, and its GPUs are shared"),
    ],
)
def test_configs_in_which_no_rank_can_host_an_engine_are_refused(options: Any, said: str):
    with pytest.raises(ValueError, match=said):
        ClusterConfig.model_validate(HOSTED | options)


@pytest.mark.parametrize(
    "options", [{}, {"critic": None, "placement": {"device": "gpu"}}], ids=["cpu", "gpu"]
)
def test_configs_in_which_ranks_host_engines_are_accepted(options: Any):
    assert ClusterConfig.model_validate(HOSTED | options).engine.process == "policy"
