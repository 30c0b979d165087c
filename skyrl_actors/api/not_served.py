"""Answer calls of the protocol that this service does not serve with 404 and the reason.

SDKs would retry a 501 for minutes.
"""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

CALLS: dict[tuple[str, str], str] = {
    ("PUT", "/sessions/{session_id}/project"): "the project of a session is fixed when it opens",
    ("GET", "/sessions/{session_id}/trace_export"): "traces are not exported over HTTP",
    ("GET", "/auth/apikey/me"): "keys have no accounts; `skyrl-actors key list` shows them",
    ("DELETE", "/auth/apikey/me"): "keys are revoked with `skyrl-actors key revoke`, not over HTTP",
}
router = APIRouter(include_in_schema=False)


def _answering(reason: str):
    async def refuse(request: Request) -> JSONResponse:
        return JSONResponse(
            {
                "detail": f"{request.method} {request.url.path} is not served: {reason}",
                "category": "user",
            },
            404,
        )

    return refuse


for (method, path), reason in CALLS.items():
    router.add_api_route(path, _answering(reason), methods=[method])
