"""Three base models on one device: answers equal undisturbed ones, whatever is killed."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import tinker
from tinker import types

from tests.conftest import run_cli
from tests.service.own_service import own_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CONFIG = "configs/cpu_catalogue.yaml"
MIXTURE = "skyrl-actors/tiny-moe"
# One call at a time in each pass and batch, so that no answer depends on what it ran with.
ALONE = ("policy.share_passes=false", "engine.max_num_seqs=1", "critic=null")
ENGINE = ("engine.max_model_len=512", "engine.kv_cache_bytes=134217728")
# Two of three are loaded, so each turn of the last one starts another's processes again.
ROUNDS = {"skyrl-actors/tiny": 4, MIXTURE: 4, "skyrl-actors/tiny-vl": 1}


async def trained(
    url: str, base: str, number: int, begun: asyncio.Event | None = None
) -> list[Any]:
    """Train and sample as a client does. Return all answers."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    model = await service.create_lora_training_client_async(base_model=base, rank=8, seed=number)
    answers: list[Any] = []
    for step in range(ROUNDS[base]):
        tokens = [(7 * i + 3 * number + step) % 200 + 1 for i in range(24)]
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 23},
        )
        passed = await model.forward_backward_async([datum], "cross_entropy")
        stepped = await model.optim_step_async(types.AdamParams(learning_rate=1e-3))
        answers.append((await passed.result_async()).loss_fn_outputs[0]["logprobs"].data)
        await stepped.result_async()
        sampler = await model.save_weights_and_get_sampling_client_async()
        params = types.SamplingParams(max_tokens=8, seed=5)
        drawn = await sampler.sample_async(types.ModelInput.from_ints(tokens[:8]), 1, params)
        answers.append((drawn.sequences[0].tokens, drawn.sequences[0].logprobs))
        if begun is not None and step == 1:
            begun.set()
    return answers


async def both(url: str, base: str, begun: asyncio.Event | None = None) -> list[Any]:
    return list(await asyncio.gather(*(trained(url, base, n, begun) for n in range(2))))


def status(name: str) -> dict[str, Any]:
    shown = run_cli("status", "--name", name, "--json")
    return json.loads(shown.stdout) if shown.stdout.startswith("{") else {"ready": False}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def parked_rank(name: str) -> int:
    """Return the process of a training rank whose base model is parked."""
    for _ in range(60):
        found = await asyncio.to_thread(status, name)
        for base, row in found["base_models"].items():
            group = found["groups"].get(f"{base} policy")
            if row["place"] == "host" and group and group["pids"]:
                return group["pids"][0]
        await asyncio.sleep(0.5)
    raise AssertionError("no base model was parked")


def one_process(title: str) -> int:
    found = [
        p.pid for p in psutil.process_iter(["cmdline"]) if title in (p.info["cmdline"] or [""])[0]
    ]
    return found[-1]


async def base_on_device(name: str) -> tuple[int, str]:
    """Return the epoch, and a base model on the devices, all parts of which run."""
    for _ in range(120):
        found = await asyncio.to_thread(status, name)
        for base, row in found["base_models"].items():
            group = found["groups"].get(f"{base} policy", {"state": "absent"})
            engines = [e["state"] for e in found["engines"] if e["name"].startswith(f"{base} ")]
            if row["place"] == "device" and [group["state"], *engines] == ["up", "HEALTHY"]:
                return found["epoch"], base
        await asyncio.sleep(0.2)
    raise AssertionError("no base model had all its parts")


async def taken_over(name: str, epoch: int, base: str) -> bool:
    """Wait for a controller after `epoch`. Return whether it let the processes of `base` run on."""
    show_log = ("logs", "controller", "--name", name, "--lines", "2000")
    for _ in range(120):
        after = await asyncio.to_thread(status, name)
        if after["ready"] and after["epoch"] > epoch:
            log = await asyncio.to_thread(run_cli, *show_log)
            return f"took over base model {base}\n" in log.stdout
        await asyncio.sleep(0.5)
    raise AssertionError("there was no next controller")


async def controller_killed(name: str) -> None:
    """Kill the controller until the next one takes over a base model that was loaded.

    It ends a base model that is being moved at that moment, and one of which a part is missing. So
    a kill that meets such a moment shows nothing.
    """
    for _ in range(3):
        epoch, base = await base_on_device(name)
        kill(one_process("ControllerActor"))
        if await taken_over(name, epoch, base):
            return
    raise AssertionError("processes that ran were started again")


async def killed_in_turn(name: str, begun: asyncio.Event) -> None:
    """Kill a parked rank, an engine that is loaded or runs, and the controller."""
    await begun.wait()
    kill(await parked_rank(name))
    await asyncio.sleep(4)
    kill(one_process("EngineActor"))
    await asyncio.sleep(6)
    await controller_killed(name)


async def in_one_service(name: str, url: str) -> dict[str, list[Any]]:
    begun = asyncio.Event()
    killing = asyncio.create_task(killed_in_turn(name, begun))
    answers = await asyncio.gather(*(both(url, base, begun) for base in ROUNDS))
    await asyncio.wait_for(killing, 180)
    return dict(zip(ROUNDS, answers, strict=True))


def test_answers_equal_undisturbed_ones_whatever_is_killed(tmp_path: Path):
    options = ("base_model.type=tiny_moe", f"base_model.name={MIXTURE}", *ALONE, *ENGINE)
    with own_service("configs/cpu_tiny.yaml", tmp_path / "alone", "alone", *options) as served:
        alone = asyncio.run(both(served[1], MIXTURE))
    folder = tmp_path / "together"
    options = (*ALONE, "parking.max_loaded=2", "parking.min_residence_s=1")
    with own_service(CONFIG, folder, "catalogue", *options) as (name, url):
        together = asyncio.run(in_one_service(name, url))
        undisturbed = {base: asyncio.run(both(url, base)) for base in ROUNDS}
        moved = [row["move_seconds"] for row in status(name)["base_models"].values()]
        assert any("load" in moves for moves in moved), "one of three was on disk"
    assert together == undisturbed
    assert undisturbed[MIXTURE] == alone, "a service of its own answers the same"
    proved = json.loads((folder / "journal" / "proved_bases.json").read_text())
    assert len(proved) == len(ROUNDS)
