"""A controller that lost only its path to PostgreSQL: clients go to the process that took over."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from skyrl_actors.api import client
from skyrl_actors.api.client import ControllerClient
from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.controller import actor
from skyrl_actors.journal.locks import SILENCE_S
from tests.fakes import FakeBackend
from tests.journal.proxy import Proxy

pytestmark = pytest.mark.parametrize("config", ["postgres"], indirect=True)


@pytest.fixture
def path(config: JournalConfig) -> Iterator[Proxy]:
    """The first process's path to the database."""
    made = Proxy(Path(str(make_url(str(config.url)).query["host"])) / ".s.PGSQL.5432")
    yield made
    made.close()


@pytest.fixture
async def two(config: JournalConfig, path: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both processes of a controller, which has started in the first one."""

    async def nothing(*_: Any, **__: Any) -> None:
        pass

    async def same(call: Any) -> Any:
        return await call

    monkeypatch.setattr(actor, "build_backend", lambda *_: FakeBackend())
    monkeypatch.setattr(actor.remote, "publish", nothing)
    monkeypatch.setattr(actor.remote, "named", lambda name: None)
    monkeypatch.setattr(actor.Standby, "end", nothing)
    monkeypatch.setattr(actor.heap, "keep_present_objects", lambda: None)
    monkeypatch.setattr("skyrl_actors.transport.rpc_server.node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(client, "settled", same)
    monkeypatch.setattr(client, "node_address", lambda: "127.0.0.1")
    database = make_url(str(config.url)).database
    direct = str(config.url)
    through = f"postgresql://postgres:@127.0.0.1:{path.port}/{database}"
    processes = [
        actor.ControllerActor(
            ClusterConfig(
                base_model=TinyBase(name="tiny"),
                checkpoint_dir=tmp_path / "checkpoints",
                journal=JournalConfig(folder=config.folder, url=url),
            ),
            {"tiny": str(tmp_path)},
            False,
            "the other",
        )
        for url in (through, direct)
    ]
    await processes[0].start()
    yield processes
    for process in processes:
        await process.close()


class Handle:
    """What Ray returns for a process, without Ray."""

    def __init__(self, process: actor.ControllerActor):
        self._process = process

    @property
    def get_rpc_address(self) -> Any:
        return self

    async def remote(self, caller: str) -> Any:
        return await self._process.get_rpc_address(caller)


async def ended(*clients: ControllerClient) -> None:
    for each in clients:
        await actor.ended(each._following)
        await each._connection.close()


async def test_clients_go_to_the_process_that_took_over(
    two: list[actor.ControllerActor], path: Proxy
):
    first, second = two
    await second.stand_by()
    handles: Any = [Handle(process) for process in two]
    found = ControllerClient(*handles)
    assert (await found.calls.status())["epoch"] == 1
    path.close()
    async with asyncio.timeout(SILENCE_S + 30):
        while (await found.calls.status())["epoch"] == 1:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    clients = (found, ControllerClient(*reversed(handles)), ControllerClient(*handles))
    for asked in clients:
        assert (await asked.calls.status())["epoch"] == 2
    await ended(*clients)
    assert first.controller.journal.is_silent and not second.controller.journal.is_silent


async def test_a_process_that_nobody_replaced_is_still_found(
    two: list[actor.ControllerActor], path: Proxy
):
    first, _ = two
    path.close()
    async with asyncio.timeout(SILENCE_S + 30):
        while not first.controller.journal.is_silent:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    handle: Any = Handle(first)
    found = ControllerClient(handle)
    assert (await found.calls.status())["epoch"] == 1
    await ended(found)
