"""Check requests and compute their digests; large requests in threads.

The threads keep the event loop responsive.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from skyrl_actors.backends.backend import Capabilities
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.digests import RequestDigest, digest_of
from skyrl_actors.controller.verbs import verb_of
from skyrl_actors.journal import encoding
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.sizes import size_of

R = TypeVar("R", bound=rq.Request)
THREAD_BYTES = 256 * 2**10  # smaller requests take well under a millisecond
THREADS = 2


class Examiner:
    """Check requests and compute their digests."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "examine")

    async def examined(
        self, request: R, spec: ModelSpec | None, config: ClusterConfig, able: Capabilities
    ) -> tuple[R, RequestDigest]:
        """Return the request with its defaults filled in, and the digest of the sent request.

        `spec` is the spec of its model, None for a sample or a new model. Raises InvalidRequest.
        The check comes first, so that a refused request costs no digest.
        """

        def examine() -> tuple[R, RequestDigest]:
            return cast(R, checked(request, spec, config, able)), digest_of(request)

        if size_of(request) <= THREAD_BYTES:
            return examine()
        return await asyncio.get_running_loop().run_in_executor(self._threads, examine)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def checked(
    request: rq.Request, spec: ModelSpec | None, config: ClusterConfig, able: Capabilities
) -> rq.Request:
    """Return the request with its defaults filled in. Raises InvalidRequest."""
    request = verb_of(request).check(request, spec, config, able)
    encoding.check(request)  # last, because it reads every number of a prompt
    return request
