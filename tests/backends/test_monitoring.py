"""The status of all parts, of which some do not answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

from skyrl_actors.backends.monitoring import Monitoring
from skyrl_actors.messages.errors import InternalError

SILENCE_S = 0.3


class Part:
    """An engine or a group that does not answer until a deadline."""

    health = "HEALTHY"
    restarts = refused = 0
    down = None

    def __init__(self, name: str):
        self.name = self.role = name
        self.builder = SimpleNamespace(names=[name])
        self.group = SimpleNamespace(usage=self._late, pids=[])

    async def _late(self) -> Any:
        await asyncio.sleep(SILENCE_S)
        raise InternalError(f"{self.name} does not answer")

    status = _late


async def test_parts_that_do_not_answer_are_waited_for_together():
    groups: Any = [Part("policy"), Part("critic")]
    engines: Any = SimpleNamespace(engines=[Part(f"engine[{i}]") for i in range(8)])
    engines.engines[7].health = "STARTING"
    phases: Any = SimpleNamespace()
    monitoring = Monitoring("s", groups, engines, phases, with_counts=False)
    monitoring._task.cancel()
    began = asyncio.get_running_loop().time()
    found = await monitoring.read()
    assert asyncio.get_running_loop().time() - began < 3 * SILENCE_S
    states = [row["state"] for row in found["engines"]]
    assert states == [*(f"engine[{i}] does not answer" for i in range(7)), "STARTING"]
    assert list(found["groups"]) == ["policy", "critic"]
