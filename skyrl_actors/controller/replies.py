"""Return answers to callers: from memory while they are there, then from the journal.

A small answer is returned at once. For a large one the caller gets its size first, and then
fetches it.
"""

from skyrl_actors.controller.waiters import ResultTable
from skyrl_actors.journal.entries import Blob, Operation
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages.errors import Corrupt, NotFound
from skyrl_actors.messages.results import Failure, Ready, Result, without_routes

AT_ONCE_BYTES = 2**16
COPIES = 2  # an answer from the journal takes its record's bytes and the decoded result


class Replies:
    """Answers of answered requests. Methods raise NotFound for ids that are unknown or swept."""

    def __init__(self, results: ResultTable, journal: Journal):
        self._results = results
        self._journal = journal

    async def ready(self, request_id: str) -> Result | Ready:
        """Return a small answer, or the size in bytes of a large one."""
        if (result := self._results.in_memory(request_id)) is not None:
            num_bytes = self._results.size_of(request_id)
            return result if num_bytes <= AT_ONCE_BYTES else Ready(num_bytes)
        operation, answer = await self._found(request_id)
        if answer.length > AT_ONCE_BYTES:
            return Ready(COPIES * answer.length)
        return await self._read(operation)

    async def whole(self, request_id: str) -> Result:
        """Return an answer of any size."""
        if (result := self._results.in_memory(request_id)) is not None:
            return result
        operation, _ = await self._found(request_id)
        return await self._read(operation)

    async def _found(self, request_id: str) -> tuple[Operation, Blob]:
        operation = await self._journal.find(request_id)
        if operation is None or operation.answered_at is None or operation.result is None:
            raise NotFound(
                f"request {request_id!r} is not known here "
                "(answers are kept for journal.retention_s)"
            )
        return operation, operation.result

    async def _read(self, operation: Operation) -> Result:
        try:
            return without_routes(await self._journal.result(operation))
        except Corrupt as error:  # final, because a retry would not repair it
            return Failure.of(error)
