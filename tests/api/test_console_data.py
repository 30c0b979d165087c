"""The data of the console, with the application in-process."""

from pathlib import Path
from typing import Any

from tests.api.local import AnsweringBackend, config_for, edge


class Phased(AnsweringBackend):
    async def status(self) -> dict[str, Any]:
        timeline = [
            {"at": 10.0, "phase": "TRAIN", "seconds": 0.5, "moves": []},
            {"at": 14.0, "phase": "SAMPLE", "seconds": 2.0, "moves": []},
        ]
        return {"phase": "SAMPLE", "phase_timeline": timeline}


async def test_each_phase_has_its_end_and_the_last_one_lasts_until_now(tmp_path: Path):
    async with edge(config_for(tmp_path), Phased(str(tmp_path))) as http:
        state = (await http.get("http://service/console/state")).json()
        phases = state["phase_timeline"]
        assert [(one["phase"], one["at"], one["ended"]) for one in phases] == [
            ("TRAIN", 10.0, 14.0),
            ("SAMPLE", 14.0, state["at"]),
        ]


async def test_a_service_without_phases_has_an_empty_timeline(tmp_path: Path):
    async with edge(config_for(tmp_path)) as http:
        assert (await http.get("http://service/console/state")).json()["phase_timeline"] == []
