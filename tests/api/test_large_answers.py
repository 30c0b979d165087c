"""Large answers: the memory for them is limited, and released when clients disconnect."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from skyrl_actors.api import schema, translate
from skyrl_actors.api.app import build_app
from skyrl_actors.api.client import ControllerClient
from skyrl_actors.api.state import SMALL_BYTES, ApiState
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.messages.keys import KeyTable
from skyrl_actors.messages.results import LossOutput, Ready
from skyrl_actors.transport.byte_budget import ByteBudget
from tests.api.local import config_for

MIB = 2**20
NUMBERS = 8 * MIB  # of 4 bytes
BODY = b'{"request_id": "r0"}'
HEADERS = {"Accept": translate.PROTOBUF, "Content-Type": "application/json"}


class OneAnswer(ControllerClient):
    """Every request has been answered with 32 MiB."""

    def __init__(self) -> None:
        handle: Any = None
        super().__init__(handle)
        self.fetched = 0

    async def _ask(
        self, method: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        if method is ControllerCalls.retrieve:
            return Ready(4 * NUMBERS)
        if method is ControllerCalls.known_keys:
            return KeyTable(version="none")
        assert method is ControllerCalls.fetch and arguments == ("r0", 4 * NUMBERS)
        self.fetched += 1
        return LossOutput(
            offsets=np.array([0, NUMBERS]),
            fields={"logprobs": np.zeros(NUMBERS, np.float32)},
            metrics={},
        )


@asynccontextmanager
async def serving(folder: Path, limit: int) -> AsyncIterator[tuple[str, int, OneAnswer, ApiState]]:
    client = OneAnswer()
    state = ApiState(config_for(folder), client)
    state.answer_budget = ByteBudget(limit, SMALL_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        server = uvicorn.Server(
            uvicorn.Config(build_app(state), log_level="warning", lifespan="off")
        )
        running = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield host, port, client, state
        finally:
            server.should_exit = server.force_exit = True
            await running


async def asks_and_does_not_read(host: str, port: int) -> socket.socket:
    """Connect with a client that has almost no buffer."""
    loop, one = asyncio.get_running_loop(), socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.setblocking(False)
    await loop.sock_connect(one, (host, port))
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: {host}\r\n"
    head += "Content-Type: application/json\r\n"
    head += f"Accept: {translate.PROTOBUF}\r\nContent-Length: {len(BODY)}\r\n\r\n"
    await loop.sock_sendall(one, head.encode() + BODY)
    return one


async def test_clients_that_do_not_read_hold_few_answers_and_are_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_actors.api.paced.STALLED_S", 1.5)
    async with serving(tmp_path, limit=128 * MIB) as (host, port, client, state):
        idle = [await asks_and_does_not_read(host, port) for _ in range(4)]
        await asyncio.sleep(1.0)
        try:
            assert client.fetched == 2, "an answer needs its bytes and those of its rendering"
        finally:
            for one in idle[2:]:
                one.close()
        async with httpx.AsyncClient(timeout=30, headers=HEADERS) as http:
            answer = await http.post(f"http://{host}:{port}/api/v1/retrieve_future", content=BODY)
        assert answer.status_code == 200 and len(answer.content) > 4 * NUMBERS
        output = schema.ForwardBackwardOutput.FromString(answer.content)
        assert len(output.loss_fn_outputs[0].fields["logprobs"].data) == 4 * NUMBERS
        for one in idle:
            one.close()
        async with asyncio.timeout(20):
            while state.answer_budget.taken:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_an_answer_without_memory_returns_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_actors.api.routes_sampling.PATIENCE_S", 0.1)
    async with serving(tmp_path, limit=128 * MIB) as (host, port, client, state):
        lease = await state.answer_budget.take("", 100 * MIB)
        async with httpx.AsyncClient(timeout=30, headers=HEADERS) as http:
            answer = await http.post(f"http://{host}:{port}/api/v1/retrieve_future", content=BODY)
            assert (
                answer.status_code == 408
                and answer.json()["type"] == "try_again"
                and client.fetched == 0
            )
            lease.release()
            assert (
                await http.post(f"http://{host}:{port}/api/v1/retrieve_future", content=BODY)
            ).status_code == 200
