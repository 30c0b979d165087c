"""Call the controller actor from ingress replicas and jobs."""

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ray.actor import ActorHandle

from skyrl_actors.controller.calls import CatalogCalls, ControllerCalls, SessionCatalogCalls
from skyrl_actors.controller.standby import actor_names
from skyrl_actors.controller.tenants import Sampler
from skyrl_actors.messages.catalog import SessionLabels
from skyrl_actors.messages.errors import InternalError, InvalidRequest, Unavailable
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Completion, Failure, PartialSample, Ready, Result, Waiting
from skyrl_actors.messages.sizes import size_of
from skyrl_actors.observe.log import named
from skyrl_actors.observe.spans import SPANS, Span
from skyrl_actors.remote import NAMESPACE, ActorDied, ask, ended, node_address, settled, typed_ray
from skyrl_actors.remote import named as named_actor
from skyrl_actors.transport.protocols import calls_of
from skyrl_actors.transport.rpc import Address, RpcClient

R = TypeVar("R")
POLL_S = 30.0
PATIENCE_S = 45.0  # an SDK gives up one attempt after a minute
GRACE_S = 3.0
COPY_TIMEOUT_S = 55.0  # an SDK gives up after a minute and repeats; the copy continues
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
FOLLOW_S = 0.5
FIND_S = 2.0
ANSWER_S = 12.0  # a process that is not active answers after 10 s
BULK_BYTES = 64 * 2**10


def find_controller(name: str) -> tuple[ActorHandle[Any], ...]:
    """Return the processes of a controller. Raises ValueError when there is none."""
    first, second = actor_names(name)
    found = typed_ray.get_actor(first, namespace=NAMESPACE)
    standby = named_actor(second)
    return (found,) if standby is None else (found, standby)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a call is repeated while the controller restarts, and how long one may take."""

    patience_s: float
    timeout_s: float = PATIENCE_S


class ControllerClient:
    """A client of the controller that retries calls.

    Every call is idempotent. A call that fails because the controller died is repeated for
    `patience_s`, while Ray restarts it or another of its processes takes over. Then the client
    raises Unavailable, which SDKs retry. `name`: under which new processes are found, if an upgrade
    has replaced all.
    """

    def __init__(
        self, *processes: ActorHandle[Any], name: str = "", patience_s: float = PATIENCE_S
    ):
        self.patience_s = patience_s
        self._processes = processes
        self._name = name
        self._following: asyncio.Task[None] | None = None
        self._finding: asyncio.Task[list[ActorHandle[Any] | None]] | None = None
        self._connection = RpcClient(self._address, ControllerCalls)
        # A separate connection, so that small calls do not wait behind large ones.
        self._bulk_connection = RpcClient(self._address, ControllerCalls)

    async def _address(self) -> Address:
        """Return the address of the active process, which answers first.

        One that stands still does not answer, so the other one is asked again after `ANSWER_S`.
        """
        here = node_address()
        asked = [
            asyncio.ensure_future(settled(process.get_rpc_address.remote(here)))
            for process in self._processes
        ]
        error = ActorDied("no process of the controller answers")
        try:
            # A single process answers once Ray has started it again.
            timeout_s = ANSWER_S if len(asked) > 1 else None
            for answer in asyncio.as_completed(asked, timeout=timeout_s):
                try:
                    address: Address | None = await answer
                except ActorDied as died:
                    error = died
                    continue
                if address is not None:
                    return address
        except TimeoutError:
            raise error from None
        else:
            await self._find()
            raise error
        finally:
            await ended(*asked)

    async def _find(self) -> None:
        """Take the processes that now have the controller's name, for the next call."""
        if not self._name:
            return
        task, loop = self._finding, asyncio.get_running_loop()
        if task is None or task.done() or task.get_loop() != loop:
            names = actor_names(self._name)
            looking = ask(lambda: [*map(named_actor, names)])
            task = self._finding = loop.create_task(looking)
        with suppress(TimeoutError):  # Ray's server may be away; then the task goes on
            async with asyncio.timeout(FIND_S):
                found = await asyncio.shield(task)
            self._processes = tuple(one for one in found if one) or self._processes

    def _follow_active(self) -> None:
        """Leave a process that another one replaced, even if its connection lives on."""
        task, loop = self._following, asyncio.get_running_loop()
        if len(self._processes) > 1 and (task is None or task.done() or task.get_loop() != loop):
            self._following = loop.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                active = await self._address()
            except (ActorDied, InternalError):
                continue
            self._connection.leave_unless(active)
            self._bulk_connection.leave_unless(active)

    def within(self, limits: Limits) -> ControllerCalls:
        """Return the controller's methods, to be called within these limits."""
        return calls_of(ControllerCalls, partial(self.call, limits))

    @property
    def calls(self) -> ControllerCalls:
        """The controller's methods. A call is repeated while the controller restarts."""
        return self.within(Limits(self.patience_s))

    @property
    def once(self) -> ControllerCalls:
        """The controller's methods. A call is made once."""
        return self.within(Limits(0.0))

    async def fault_within(self, timeout_s: float) -> str | None:
        """Return why requests are not served now, or None. Raises Unavailable without an answer."""
        return await self.within(Limits(0.0, timeout_s)).fault()

    async def call(
        self, limits: Limits, method: Callable[..., Any], *arguments: Any, **named: Any
    ) -> Any:
        """Call a method of the controller, and again within the limits if it dies meanwhile."""
        deadline = asyncio.get_running_loop().time() + limits.patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(limits.timeout_s):
                    return await self._ask(method, arguments, named)
            except TimeoutError:
                raise Unavailable(
                    f"the controller did not answer {method.__name__} within "
                    f"{limits.timeout_s:.0f} s"
                ) from None
            except ActorDied as error:
                if asyncio.get_running_loop().time() + pause_s > deadline:
                    raise Unavailable(f"the controller is restarting: {error}") from None
            # Ray queues calls for an actor that it is restarting, but not in the first moments
            # after its death.
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _ask(
        self, method: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        is_bulk = method is ControllerCalls.fetch or (
            method is ControllerCalls.submit and size_of(arguments[0]) > BULK_BYTES
        )
        self._follow_active()
        connection = self._bulk_connection if is_bulk else self._connection
        return await connection.call(method, *arguments, **named)

    def new_request_id(self, request: Request, mark: str = "") -> str:
        """Return a new id for a request. `mark` is the owner's, and ends the id."""
        return f"r{uuid.uuid4().hex}{mark}"

    def copy_session_id(self, digest: str, mark: str) -> str:
        """Return the id of the session of a copied checkpoint."""
        return f"s{digest}{mark}"

    async def submit(self, request: Request, mark: str = "", request_id: str | None = None) -> str:
        """Submit a request. A repeat with the same `request_id` is the same request."""
        began, request_id = time.time(), request_id or self.new_request_id(request, mark)
        named(request_id)
        accepted = await self.calls.submit(request, request_id)
        self._spanned("accept", accepted, began)
        return accepted

    @staticmethod
    def _spanned(name: str, request_id: str, began: float) -> None:
        if SPANS.sends:
            SPANS.send(
                Span(
                    name=name,
                    row="ingress",
                    began=began,
                    seconds=time.time() - began,
                    request_id=request_id,
                )
            )

    async def retrieve(self, request_id: str, timeout_s: float) -> Result | Ready | Waiting:
        """Return the result, or Waiting after `timeout_s`, even if the controller is down.

        A large answer is returned as Ready, for `fetch`.
        """
        began = time.time()
        named(request_id)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            try:
                limits = Limits(0.0, left_s + GRACE_S)
                found = await self.within(limits).retrieve(request_id, left_s)
                if not isinstance(found, Waiting):
                    self._spanned("deliver", request_id, began)
                return found
            except Unavailable:
                if left_s <= LONGEST_PAUSE_S:
                    return Waiting.paused("unreachable")
            await asyncio.sleep(LONGEST_PAUSE_S / 5)

    async def fetch(self, request_id: str, ready: Ready) -> Result:
        """Return a large answer. Raises Unavailable when the controller dies and stays down."""
        found: Any = await self.calls.fetch(request_id, ready.num_bytes)
        return found  # loaded: only the server sees the Deferred

    async def run(self, request: Request, expected: type[R]) -> R:
        """Submit the request and return its result."""
        return await self.result(await self.submit(request), expected)

    async def result(self, request_id: str, expected: type[R]) -> R:
        """Wait for the result of a request.

        Raises InvalidRequest for a failure of category user, else InternalError.
        """
        while True:
            result = await self.retrieve(request_id, POLL_S)
            if isinstance(result, Ready):
                try:
                    result = await self.fetch(request_id, result)
                except Unavailable:
                    await asyncio.sleep(LONGEST_PAUSE_S)
                    continue
            if isinstance(result, Failure):
                raise (InvalidRequest if result.category == "user" else InternalError)(
                    result.message
                )
            if not isinstance(result, Waiting):
                assert isinstance(result, expected), (
                    f"{type(result).__name__} instead of {expected.__name__}"
                )
                return result

    async def create_session(self, labels: SessionLabels, mark: str = "") -> str:
        """Create a session under a new id, which ends with the owner's mark."""
        return await self.calls.create_session(f"s{uuid.uuid4().hex[:16]}{mark}", labels)

    async def open_shared_sampler(
        self, base_model: str | None, path: str | None, mark: str = ""
    ) -> Sampler:
        """Open the sampler that all requests for these weights share."""
        return await self.calls.open_sampler(None, None, base_model, path)

    @property
    def catalog(self) -> CatalogCalls:
        """The catalog of training runs and their checkpoints."""
        return calls_of(CatalogCalls, self._of_catalog)

    async def _of_catalog(self, method: Callable[..., Any], *arguments: Any) -> Any:
        timeout_s = COPY_TIMEOUT_S if method is CatalogCalls.copy else PATIENCE_S
        verb: Any = method.__name__
        return await self.within(Limits(self.patience_s, timeout_s)).catalog(verb, *arguments)

    @property
    def session_catalog(self) -> SessionCatalogCalls:
        """The catalog of live and recorded sessions."""
        return calls_of(SessionCatalogCalls, self._of_session_catalog)

    async def _of_session_catalog(self, method: Callable[..., Any], *arguments: Any) -> Any:
        verb: Any = method.__name__
        return await self.calls.session_catalog(verb, *arguments)

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample | Result:
        """Return new tokens of a streamed sample beyond the first `have`, or its result."""
        try:
            limits = Limits(0.0, timeout_s + GRACE_S)
            news = await self.within(limits).partial(request_id, have, timeout_s)
            return await self.fetch(request_id, news) if isinstance(news, Ready) else news
        except Unavailable:
            await asyncio.sleep(LONGEST_PAUSE_S)
            return PartialSample()

    async def completed(
        self, sampler_id: str, clone: int, cursor: int, timeout_s: float
    ) -> tuple[list[Completion], int]:
        """Return new completions and the cursor.

        There are none after `timeout_s`, or if the controller is down.
        """
        try:
            limits = Limits(0.0, timeout_s + GRACE_S)
            return await self.within(limits).completed(sampler_id, clone, cursor, timeout_s)
        except Unavailable:
            return [], cursor
