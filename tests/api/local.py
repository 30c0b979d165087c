"""The HTTP application with the real controller and journal, and a backend in memory.

Only Ray, torch and vLLM are missing. Run:

python -m tests.api.local PORT FOLDER BASE_FOLDER [HTTP_JSON [ROOM_FOR_LORA_RANKS SILENT_S]]
"""

import asyncio
import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from skyrl_actors.api.app import build_app
from skyrl_actors.api.client import ControllerClient
from skyrl_actors.api.state import ApiState
from skyrl_actors.backends.backend import AdapterMemory
from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.tenants import TenantTable
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import NotFound
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import LossCall, ModelSpec
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import LossOutput, SampleOutput, Sequence
from skyrl_actors.messages.sampling import PromptAlternatives, TargetLogprobs
from skyrl_actors.messages.weights import SamplerWeights
from skyrl_actors.transport.encoding import CallEncoding
from skyrl_actors.transport.frames import HEAD, Frame
from skyrl_actors.transport.protocols import Deferred
from tests.fakes import FakeBackend, changed

MODEL = "Qwen/Qwen3-8B"


class AnsweringBackend(FakeBackend):
    """Returns results of the right shapes: logprob -1 for every token, and -2 if tempered."""

    def __init__(self, base_folder: str) -> None:
        super().__init__()
        self.base_folder = base_folder
        self.sampling = asyncio.Event()  # clear: samples wait
        self.sampling.set()
        self.sample_s = 0.0
        self.sampled: list[str] = []

    async def start(self, epoch: int) -> Any:
        return changed(
            await super().start(epoch),
            base_model=MODEL,
            base_folder=self.base_folder,
            vocab_size=320,
            max_context_tokens=512,
            max_sample_tokens=512,
            roles=("policy", "critic"),
            adapters=self.adapters,
        )

    async def forward_backward(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        columns: Columns,
        loss: LossCall | None,
        forward_only: bool,
        weight: float = 1.0,
    ) -> LossOutput:
        await super().forward_backward(spec, precondition, columns, loss, forward_only)
        ones = np.ones(columns.shape, np.float32)
        fields = {"values" if spec.role == "critic" else "logprobs": -ones}
        if loss is not None:
            fields["elementwise_loss"] = ones
        return LossOutput(
            offsets=columns.offsets,
            fields=fields,
            metrics={"loss:sum": float(columns.num_tokens)},
            widths=columns.widths,
        )

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        await self.sampling.wait()
        await asyncio.sleep(self.sample_s)
        self.sampled.append(request_id)
        length = params.max_tokens
        one = Sequence(
            tokens=np.full(length, 7, np.int32),
            logprobs=np.full(length, -1.0, np.float32),
            stop_reason="length",
        )
        if params.shows_processed:
            one = replace(
                one, tempered=np.full(length, -2.0 if params.processes else -1.0, np.float32)
            )
        logprobs = np.full(len(prompt), -1.0, np.float32)
        logprobs[0] = np.nan
        if params.prompt_logprobs_last_n is not None:
            logprobs[: -params.prompt_logprobs_last_n] = np.nan
        k, alternatives = params.topk_prompt_logprobs, params.prompt_alternatives
        targets = params.prompt_targets
        cells = (len(prompt) - 1, alternatives)
        if top := params.topk_sample_logprobs:
            one = replace(
                one,
                topk_ids=np.full((length, top), 7, np.int32),
                topk_logprobs=np.full((length, top), -1.0, np.float32),
            )
        return SampleOutput(
            sequences=(one,) * params.num_samples,
            version=weights.version,
            prompt_logprobs=logprobs if params.prompt_logprobs else None,
            topk_prompt_ids=np.full((len(prompt), k), 7, np.int32) if k else None,
            topk_prompt_logprobs=np.full((len(prompt), k), -1.0, np.float32) if k else None,
            targets=targets
            and TargetLogprobs(
                np.full(len(targets.ids), -1.0, np.float32), targets.shape, targets.layout
            ),
            alternatives=PromptAlternatives(np.full(cells, 7), np.full(cells, -1.0, np.float32))
            if alternatives
            else None,
        )


ENCODING = CallEncoding(ControllerCalls)


def sent(frame: Frame) -> tuple[memoryview, int]:
    """Return the body and the number of arrays of a frame, as another process reads them."""
    content = bytearray(b"".join(frame))
    return memoryview(content)[HEAD.size :], HEAD.unpack_from(content)[1]


class LocalClient(ControllerClient):
    """A client of a controller in this process. Calls and results are encoded and decoded."""

    def __init__(self, controller: Controller):
        handle: Any = None
        super().__init__(handle)
        self._controller = controller
        self._process = {"fault": controller.readiness, "status": controller}

    async def _ask(
        self, method: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        name = method.__name__
        call = ENCODING.decoded_call(*sent(ENCODING.call(1, name, arguments, named)))
        part = self._process.get(name) or self._controller.part_for(name)
        result = getattr(part, name)(*call[2], **call[3])
        result = await result if inspect.isawaitable(result) else result
        if isinstance(result, Deferred):
            result = await result.load()
        _, is_result, found = ENCODING.decoded_answer(*sent(ENCODING.answer(1, name, result)))
        if not is_result:
            raise found
        return found


class FolderLogs:
    """Logs in the files of a folder, in place of those that Ray reads."""

    def __init__(self, folder: Path):
        self._folder = folder

    def parts(self) -> list[str]:
        return sorted(path.name for path in self._folder.glob("*"))

    def newest(self, part: str, lines: int) -> str:
        if part not in self.parts():
            raise NotFound(f"no part {part}")
        return "".join((self._folder / part).read_text().splitlines(keepends=True)[-lines:])


def logs_of(config: ClusterConfig) -> FolderLogs:
    return FolderLogs(config.checkpoint_dir.parent / "logs")


@asynccontextmanager
async def edge(
    config: ClusterConfig, backend: Any = None, **headers: str
) -> AsyncIterator[httpx.AsyncClient]:
    """The application in this process, without sockets."""
    controller = Controller(
        config,
        backend or AnsweringBackend(str(config.checkpoint_dir)),
        SqlJournal(config.journal, KINDS),
    )
    await controller.start()
    transport = httpx.ASGITransport(
        build_app(ApiState(config, LocalClient(controller), logs_of(config))),
        raise_app_exceptions=False,
    )
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost/api/v1", headers=headers
    ) as made:
        yield made
    await controller.close()


def silenced(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list: sessions in it count as silent, and no other does, however slow a test is."""
    silent: list[str] = []

    def those(tenants: TenantTable, *_: float) -> list[str]:
        return [name for name in silent if name in tenants.sessions]

    patch.setattr(TenantTable, "silent_sessions", those)
    return silent


def config_for(folder: Path, **parts: Any) -> ClusterConfig:
    journal = JournalConfig(folder=folder / "journal")
    return ClusterConfig(
        base_model=TinyBase(name=MODEL),
        checkpoint_dir=folder / "checkpoints",
        journal=journal,
        **parts,
    )


async def posted(http: httpx.AsyncClient, path: str, /, **body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def resolved(http: httpx.AsyncClient, path: str, /, **body: Any) -> Any:
    """Submit a request and return its result, after as many polls as it takes."""
    asked = {"request_id": (await posted(http, path, **body))["request_id"]}
    while (answer := await http.post("/retrieve_future", json=asked)).status_code == 408:
        pass
    assert answer.status_code == 200, answer.text
    return answer.json()


async def serve(
    port: int, folder: Path, base_folder: str, http: str = "{}", room: str = "", silent_s: str = ""
) -> None:
    config, backend = config_for(folder, http=json.loads(http)), AnsweringBackend(base_folder)
    if room:
        backend.adapters = AdapterMemory(int(room), 1)
    controller = Controller(config, backend, SqlJournal(config.journal, KINDS))
    state = ApiState(config, LocalClient(controller), logs_of(config))
    if silent_s:
        controller._capacity.session_silent_s = float(silent_s)
        state.long_poll_s = 1.0
    await controller.start()
    app = build_app(state)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
    try:
        await server.serve()
    finally:
        await controller.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))


async def model_in(http: httpx.AsyncClient) -> tuple[str, str]:
    """Create a session with a model; return both names."""
    session = (await posted(http, "/create_session"))["session_id"]
    await resolved(http, "/create_model", session_id=session, model_seq_id=0, base_model=MODEL)
    return session, f"{session}:train:0"
