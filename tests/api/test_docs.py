"""The API reference equals the routes and the config."""

from pathlib import Path

import httpx

from skyrl_actors.api import not_served
from skyrl_actors.api.api_reference import markdown
from tests.api.local import config_for, edge

DOCS = Path(__file__).parent.parent.parent / "docs" / "reference"


def test_the_api_reference_matches_the_routes():
    assert (DOCS / "api.md").read_text() == markdown(), (
        "generate it again: python -m skyrl_actors.api.api_reference > docs/reference/api.md"
    )


async def test_calls_that_are_not_served_get_404_with_the_reason(tmp_path: Path):
    async with edge(config_for(tmp_path)) as http:
        for (method, path), reason in not_served.CALLS.items():
            answer: httpx.Response = await http.request(method, path.replace("{session_id}", "s1"))
            assert answer.status_code == 404 and reason in answer.json()["detail"]
