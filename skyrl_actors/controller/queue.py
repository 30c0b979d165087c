"""Decide which request may start now (pure).

1. Requests of one model start in the order in which they were accepted, one at a time. A client
   sends a request only after the one before was acknowledged, so this is the client's order. Only
   the chunks of one forward_backward may arrive in another order, and they commute.
2. Requests of different models are independent.
3. The same (stream, seq_id) with the same body is the same request: it gets the first request id
   and runs once. With another body it is a Conflict. The newest `KEPT_PER_STREAM` numbers of a
   stream are known; retries come within minutes.
4. Open requests are bounded in number and in bytes, in total and for each API key. A key may have
   as many as are free, so that some are left for the next key (`shares.py`). One more is a
   CapacityError, which clients retry.
5. A request is reserved when it arrives. It starts only after it was confirmed, that is, written
   where no crash can lose it. A request that could not be written is withdrawn without a trace.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from skyrl_actors.controller.digests import RequestDigest
from skyrl_actors.controller.shares import Shares
from skyrl_actors.messages.errors import CapacityError, Conflict
from skyrl_actors.messages.paths import owner_of

KEPT_PER_STREAM = 10_000


class RequestQueue:
    """The open requests of all models, and the sequence numbers of their streams."""

    def __init__(self, requests: Shares, payload_bytes: Shares):
        self._requests = requests
        self._bytes = payload_bytes
        self._waiting: dict[str, deque[str]] = {}
        self._running: set[str] = set()
        # stream -> seq_id -> (digest, request id)
        self._accepted: dict[str, OrderedDict[int, tuple[int, str]]] = {}
        self._open: dict[str, int] = {}  # request id -> bytes of its payload
        self._unconfirmed: set[str] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def held(self, owner: str) -> int:
        """Return the number of open requests of an owner."""
        return self._requests.held(owner)

    def open_by_owner(self) -> dict[str, int]:
        """Return the number of open requests by owner."""
        return self._requests.by_owner()

    def lengths(self) -> dict[str, int]:
        """Return the number of waiting requests by model."""
        return {model_id: len(waiting) for model_id, waiting in self._waiting.items() if waiting}

    def known(self, stream: str, seq_id: int | None, digest: int) -> str | None:
        """Return the id of the first request with this number, if there was one (rule 3).

        Raises Conflict when its body was another one.
        """
        if seq_id is None or seq_id not in self._accepted.get(stream, ()):
            return None
        first_digest, request_id = self._accepted[stream][seq_id]
        if digest != first_digest and not (
            isinstance(digest, RequestDigest) and digest.matches(first_digest)
        ):
            raise Conflict(f"{stream}: sequence number {seq_id} was used before with another body")
        return request_id

    def reserve(
        self,
        request_id: str,
        stream: str,
        seq_id: int | None,
        digest: int,
        model_id: str | None,
        bounded: bool = True,
        num_bytes: int = 0,
    ) -> None:
        """Reserve a new request. `model_id` is None for a request that may start at once.

        Raises CapacityError if `bounded` and a limit is reached.
        """
        if bounded:
            self.check_room(owner_of(request_id), num_bytes)
        self._record(request_id, stream, seq_id, digest)
        self._open[request_id] = num_bytes
        self._requests.take(owner_of(request_id), 1)
        self._bytes.take(owner_of(request_id), num_bytes)
        self._unconfirmed.add(request_id)
        if model_id is not None:
            self._waiting.setdefault(model_id, deque()).append(request_id)

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Raise CapacityError if an owner may not have one more request of this size."""
        whose = "of this API key " if owner else ""
        if not self._requests.has_room(owner, 1):
            raise CapacityError(
                f"{self._requests.held(owner)} requests {whose}are open, the most there may be now "
                "(limits.open_requests); "
                "try again when some were answered"
            )
        if not self._bytes.has_room(owner, num_bytes):
            raise CapacityError(
                f"open requests {whose}have {self._bytes.held(owner)} bytes, and with this one's "
                f"{num_bytes} they would have more than there is room for now "
                "(limits.queued_bytes); try again when some were answered"
            )

    def _record(self, request_id: str, stream: str, seq_id: int | None, digest: int) -> None:
        if seq_id is not None:
            numbers = self._accepted.setdefault(stream, OrderedDict())
            numbers[seq_id] = (int(digest), request_id)
            if len(numbers) > KEPT_PER_STREAM:
                numbers.popitem(last=False)

    def recall(self, stream: str, older: Sequence[tuple[int, int, str]]) -> None:
        """Add requests from before a restart: (seq_id, digest, request id), oldest first.

        Requests that arrived since the restart count as newer.
        """
        numbers = OrderedDict(
            (seq_id, (digest, request_id)) for seq_id, digest, request_id in older
        )
        numbers.update(self._accepted.get(stream, {}))
        while len(numbers) > KEPT_PER_STREAM:
            numbers.popitem(last=False)
        self._accepted[stream] = numbers

    def confirm(self, request_id: str) -> None:
        """Allow a request to start, because it is durable (rule 5)."""
        self._unconfirmed.discard(request_id)

    def withdraw(
        self, request_id: str, stream: str, seq_id: int | None, model_id: str | None
    ) -> None:
        """Remove a request that could not be written (rule 5)."""
        self._close(request_id)
        self._unconfirmed.discard(request_id)
        if seq_id is not None:
            self._accepted.get(stream, OrderedDict()).pop(seq_id, None)
        if model_id is not None and request_id in self._waiting.get(model_id, ()):
            self._waiting[model_id].remove(request_id)

    def head(self, model_id: str) -> str | None:
        """Return the model's next request, confirmed or not."""
        waiting = self._waiting.get(model_id)
        return waiting[0] if waiting else None

    def next(self, model_id: str) -> str | None:
        """Take out the model's next request if it may start now (rules 1 and 5)."""
        head = self.head(model_id)
        if model_id in self._running or head is None or head in self._unconfirmed:
            return None
        self._running.add(model_id)
        return self._waiting[model_id].popleft()

    def drain(self, model_id: str) -> list[str]:
        """Take out the model's confirmed requests that have not started, and return their ids."""
        waiting = self._waiting.pop(model_id, deque())
        gone = [request_id for request_id in waiting if request_id not in self._unconfirmed]
        staying = deque(request_id for request_id in waiting if request_id in self._unconfirmed)
        if staying:
            self._waiting[model_id] = staying
        for request_id in gone:
            self._close(request_id)
        return gone

    def _close(self, request_id: str) -> None:
        num_bytes = self._open.pop(request_id, None)
        if num_bytes is not None:
            owner = owner_of(request_id)
            self._requests.give(owner, 1)
            self._bytes.give(owner, num_bytes)

    def finish(self, request_id: str, model_id: str | None) -> None:
        """Close an answered request, and let the model's next one start."""
        self._close(request_id)
        if model_id is not None:
            self._running.discard(model_id)

    def forget(self, stream: str) -> None:
        """Forget a stream that ended; its sequence numbers may be used again."""
        self._accepted.pop(stream, None)
        if not self._waiting.get(stream):
            self._waiting.pop(stream, None)
