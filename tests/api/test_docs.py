"""Tables of the docs are those of the routes and the config."""

from pathlib import Path

import httpx

from skyrl_actors.api import not_served
from skyrl_actors.api.table import markdown
from tests.api.local import config_for, edge

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_the_docs_say_what_the_routes_are():
    assert (DOCS / "api.md").read_text() == markdown(), "write it anew: python -m skyrl_actors.api.table > docs/api.md"


async def test_what_is_not_served_says_why(tmp_path: Path):
    async with edge(config_for(tmp_path)) as http:
        for (method, path), reason in not_served.CALLS.items():
            answer: httpx.Response = await http.request(method, path.replace("{session_id}", "s1"))
            assert answer.status_code == 404 and reason in answer.json()["detail"]
