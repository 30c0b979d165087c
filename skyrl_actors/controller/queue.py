"""Which request may start now (pure).

1. Requests of one model start in the order in which they were accepted, one at a time. A client sends the next request
   only when the one before was acknowledged, so this is its own order; only the chunks of one forward_backward may
   arrive in another order, and they commute.
2. Requests of different models are independent.
3. The same (stream, seq_id) with the same body is the same request: it gets the first request id and runs once. With
   another body it is a Conflict. The newest `REMEMBERED` numbers of a stream are known; retries come within minutes.
4. Open requests are bounded in number and in bytes, in total and for the holder of one API key; a key may have as many as
   are free, so that some are left for the next key (`shares.py`). One more is a CapacityError, which clients try again.
5. A request is reserved when it arrives and starts only when it was confirmed: written where no crash can lose it. One
   that could not be written is withdrawn, as if it had never come.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from skyrl_actors.controller.digests import RequestDigest
from skyrl_actors.controller.shares import Shares
from skyrl_actors.messages.errors import CapacityError, Conflict
from skyrl_actors.messages.paths import owner_of

REMEMBERED = 10_000


class RequestQueue:
    def __init__(self, requests: Shares, payload_bytes: Shares):
        self._requests = requests
        self._bytes = payload_bytes
        self._lines: dict[str, deque[str]] = {}
        self._running: set[str] = set()
        self._accepted: dict[str, OrderedDict[int, tuple[int, str]]] = {}  # stream -> seq_id -> (digest, request id)
        self._open: dict[str, int] = {}  # request id -> bytes of its payload
        self._unconfirmed: set[str] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def lengths(self) -> dict[str, int]:
        return {model_id: len(line) for model_id, line in self._lines.items() if line}

    def known(self, stream: str, seq_id: int | None, digest: int) -> str | None:
        """Rule 3: the id of the first request with this number, if there was one."""
        if seq_id is None or seq_id not in self._accepted.get(stream, ()):
            return None
        first_digest, request_id = self._accepted[stream][seq_id]
        if digest != first_digest and not (isinstance(digest, RequestDigest) and digest.matches(first_digest)):
            raise Conflict(f"{stream}: sequence number {seq_id} was used before with another body")
        return request_id

    def reserve(
        self,
        request_id: str,
        stream: str,
        seq_id: int | None,
        digest: int,
        line: str | None,
        bounded: bool = True,
        num_bytes: int = 0,
    ) -> None:
        """Take a new request; `line` is the model whose order it keeps, None for one that may start at once."""
        if bounded:
            self._check_room(owner_of(request_id), num_bytes)
        self.remember(request_id, stream, seq_id, digest)
        self._open[request_id] = num_bytes
        self._requests.take(owner_of(request_id), 1)
        self._bytes.take(owner_of(request_id), num_bytes)
        self._unconfirmed.add(request_id)
        if line is not None:
            self._lines.setdefault(line, deque()).append(request_id)

    def _check_room(self, owner: str, num_bytes: int) -> None:
        whose = "of this API key " if owner else ""
        if not self._requests.has_room(owner, 1):
            raise CapacityError(
                f"{self._requests.held(owner)} requests {whose}are open, the most there may be now "
                "(limits.open_requests, limits.open_requests_per_key); try again when some were answered"
            )
        if not self._bytes.has_room(owner, num_bytes):
            raise CapacityError(
                f"open requests {whose}have {self._bytes.held(owner)} bytes, and with this one's {num_bytes} they would "
                "have more than there is room for now (limits.queued_bytes); try again when some were answered"
            )

    def remember(self, request_id: str, stream: str, seq_id: int | None, digest: int) -> None:
        if seq_id is not None:
            numbers = self._accepted.setdefault(stream, OrderedDict())
            numbers[seq_id] = (int(digest), request_id)
            if len(numbers) > REMEMBERED:
                numbers.popitem(last=False)

    def recall(self, stream: str, older: Sequence[tuple[int, int, str]]) -> None:
        """(seq_id, digest, request id) from before a restart, oldest first: known again, behind what came since."""
        numbers = OrderedDict((seq_id, (digest, request_id)) for seq_id, digest, request_id in older)
        numbers.update(self._accepted.get(stream, {}))
        while len(numbers) > REMEMBERED:
            numbers.popitem(last=False)
        self._accepted[stream] = numbers

    def confirm(self, request_id: str) -> None:
        self._unconfirmed.discard(request_id)

    def withdraw(self, request_id: str, stream: str, seq_id: int | None, line: str | None) -> None:
        self._close(request_id)
        self._unconfirmed.discard(request_id)
        if seq_id is not None:
            self._accepted.get(stream, OrderedDict()).pop(seq_id, None)
        if line is not None and request_id in self._lines.get(line, ()):
            self._lines[line].remove(request_id)

    def head(self, line: str) -> str | None:
        """The request of this model that starts next; it may wait for its confirmation."""
        waiting = self._lines.get(line)
        return waiting[0] if waiting else None

    def next(self, line: str) -> str | None:
        """Rules 1 and 5: the request of this model that starts now, if none is running."""
        head = self.head(line)
        if line in self._running or head is None or head in self._unconfirmed:
            return None
        self._running.add(line)
        return self._lines[line].popleft()

    def drain(self, line: str) -> list[str]:
        """Take out the confirmed requests of a model that have not started."""
        waiting = self._lines.pop(line, deque())
        gone = [request_id for request_id in waiting if request_id not in self._unconfirmed]
        staying = deque(request_id for request_id in waiting if request_id in self._unconfirmed)
        if staying:
            self._lines[line] = staying
        for request_id in gone:
            self._close(request_id)
        return gone

    def _close(self, request_id: str) -> None:
        num_bytes = self._open.pop(request_id, None)
        if num_bytes is not None:
            owner = owner_of(request_id)
            self._requests.give(owner, 1)
            self._bytes.give(owner, num_bytes)

    def finish(self, request_id: str, line: str | None) -> None:
        self._close(request_id)
        if line is not None:
            self._running.discard(line)

    def forget(self, stream: str) -> None:
        """A stream that ended: its sequence numbers are free again."""
        self._accepted.pop(stream, None)
        if not self._lines.get(stream):
            self._lines.pop(stream, None)
