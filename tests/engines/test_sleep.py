"""One real vLLM engine, without Ray: sleep frees memory, dropped weights are never sampled, and loading restores them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

KV_BYTES = 256 * 2**20
SCRIPT = """
import asyncio, json, sys
from pathlib import Path

async def main(folder: str, kv_bytes: int) -> None:
    from skyrl_actors.engines.interface import BASE_VERSION, EngineSpec
    from skyrl_actors.engines.vllm_engine import VllmEngine
    from skyrl_actors.messages.errors import InternalError
    from skyrl_actors.messages.requests import SamplingParams
    from skyrl_actors.transfer.folders import full_manifests

    engine = VllmEngine(EngineSpec("e", folder, "cpu", "float32", 256, 8, 512, kv_bytes, 2, 8, 4, True, 60.0))
    await engine.start()
    said = {"rss_awake": (await engine.status()).rss_bytes}
    params = SamplingParams(4, temperature=0.0, prompt_logprobs=True)

    async def logprobs(name: str) -> list[float]:
        output = await engine.sample(name, (5, 6, 7, 8, 9), params, None, BASE_VERSION)
        return output.prompt_logprobs[1:].tolist() + output.sequences[0].logprobs.tolist()

    said["first"] = await logprobs("a")
    await engine.sleep(1)
    said["rss_level_1"] = (await engine.status()).rss_bytes
    await engine.wake("weights")
    await engine.wake("kv_cache")
    said["after_level_1"] = await logprobs("b")
    await engine.sleep(2)
    said["version_level_2"] = (await engine.status()).loaded_version
    await engine.wake("weights")
    await engine.wake("kv_cache")
    try:
        await logprobs("c")
    except InternalError as error:
        said["refused"] = str(error)
    await engine.load_full(BASE_VERSION, full_manifests(Path(folder), BASE_VERSION))
    said["after_level_2"] = await logprobs("d")
    await engine.stop()
    print(json.dumps(said))

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_sleep_frees_memory_and_dropped_weights_are_never_sampled(random_base: Path, tmp_path: Path):
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    from skyrl_actors.backends.environment import actor_environment
    from skyrl_actors.config.cluster import ClusterConfig

    environment = {**os.environ, **actor_environment(ClusterConfig()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(random_base), str(KV_BYTES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["rss_awake"] - said["rss_level_1"] > 0.8 * KV_BYTES
    assert said["after_level_1"] == said["first"]
    assert said["version_level_2"] is None
    assert "holds None" in said["refused"]
    assert max(abs(a - b) for a, b in zip(said["after_level_2"], said["first"], strict=True)) < 1e-4
