"""Routes that serve checkpoints as files: archives, exports for other tools, copies."""

import asyncio
import hashlib
import time
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from skyrl_actors.api import archives, translate, wire
from skyrl_actors.api.access import caller_of, readable
from skyrl_actors.api.downloads import Download
from skyrl_actors.api.routes_catalog import checkpoint_path
from skyrl_actors.api.state import ARCHIVES, state_of
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.messages.errors import InvalidRequest, NotFound
from skyrl_actors.messages.paths import TinkerPath, model_id_for, parse_path

router = APIRouter()


async def signed_links(
    request: Request, path: TinkerPath, files: list[str]
) -> tuple[list[str], int]:
    """Return signed links to files of a checkpoint ("" is all of them), and when they expire."""
    expires = int(time.time()) + archives.VALID_S
    secret = await asyncio.to_thread(archives.secret_of, state_of(request).folders.root)
    service = archives.public_url(state_of(request).config.http, request.headers.get("host", ""))
    base = f"{service}{ARCHIVES}/{quote(path.model_id)}/{path.kind}/{path.name}"
    queries = [
        {
            "expires": expires,
            "signature": archives.signature(secret, path, expires, file),
            "file": file,
        }
        for file in files
    ]
    return [
        f"{base}?{urlencode({key: value for key, value in query.items() if value != ''})}"
        for query in queries
    ], expires


@router.get("/training_runs/{run_id}/checkpoints/{checkpoint:path}/archive")
async def archive(run_id: str, checkpoint: str, request: Request) -> Response:
    """Redirect to a link that needs no API key and expires.

    SDKs read the link and its expiry from this answer.
    """
    path = await readable(request, checkpoint_path(run_id, checkpoint))
    await state_of(request).client.calls.checkpoint_spec(path)
    (link,), expires = await signed_links(request, path, [""])
    return Response(
        status_code=302, headers={"Location": link, "Expires": formatdate(expires, usegmt=True)}
    )


@router.get("/training_runs/{run_id}/checkpoints/{checkpoint:path}/external_weights_urls")
async def external_weights_urls(run_id: str, checkpoint: str, request: Request) -> dict[str, Any]:
    """Return signed links to the files of an export."""
    path = await readable(request, checkpoint_path(run_id, checkpoint))
    if path.kind != "external_weights":
        raise InvalidRequest(f"{path} is not an export; create one with save_weights_external")
    files = await asyncio.to_thread(state_of(request).folders.files_for_others, path)
    names = [file.name for file in files]
    links, expires = await signed_links(request, path, names)
    return {
        "urls": dict(zip(names, links, strict=True)),
        "expires": datetime.fromtimestamp(expires, UTC).isoformat(),
    }


@router.get("/archives/{run_id}/{checkpoint:path}")
async def download(
    run_id: str, checkpoint: str, expires: int, signature: str, request: Request, file: str = ""
) -> Response:
    """Download the target of a signed link."""
    state, path = state_of(request), checkpoint_path(run_id, checkpoint)
    archives.check(
        await asyncio.to_thread(archives.secret_of, state.folders.root),
        path,
        expires,
        signature,
        file,
    )
    download = Download(path, state.downloads)
    try:
        if file:
            found = await asyncio.to_thread(_file_of, state.folders, path, file)
            return download.of(FileResponse(found, filename=file))
        members = await asyncio.to_thread(_members_of, state.folders, path)
    except BaseException:
        download.give_up()
        raise
    name = f"{path.model_id}-{path.name}.tar".replace(":", "_")
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    tar = StreamingResponse(members.tar(), media_type="application/x-tar", headers=headers)
    return download.of(tar, members.close)


def _members_of(folders: CheckpointFolders, path: TinkerPath) -> archives.Members:
    return archives.opened(folders.existing(path), lambda: folders.version(path))


def _file_of(folders: CheckpointFolders, path: TinkerPath, name: str) -> Path:
    for file in folders.files_for_others(path):
        if file.name == name:
            return file
    raise NotFound(f"no file {name[:80]!r} in this checkpoint")


@router.post("/copy_weights")
async def copy_weights(
    body: wire.CopyWeights,
    request: Request,
    x_tinker_weights_access_token: str | None = Header(default=None),
    x_idempotency_key: str | None = Header(default=None),
) -> dict[str, Any]:
    """Copy a checkpoint to a run of the caller.

    The checkpoint can be a published or shared one of another account.
    """
    source = await readable(
        request,
        parse_path(body.source_path),
        body.weights_access_token or x_tinker_weights_access_token,
    )
    if source.kind == "steps":
        raise InvalidRequest(f"{source} is a past step; create a model from it and save that model")
    caller, client = caller_of(request), state_of(request).client
    translate.check_copy(body)
    if body.session_id is not None and body.model_seq_id is not None:
        session_id, seq = caller.own(body.session_id, "session"), body.model_seq_id
    elif body.destination_project_id is not None:
        # The copy gets its own session, which is the same when the request is repeated.
        digest = hashlib.sha256(
            f"{x_idempotency_key or time.time_ns()} {source} {body.destination_project_id}".encode()
        )
        session_id, seq = client.copy_session_id(digest.hexdigest()[:16], caller.mark), 0
    else:
        raise InvalidRequest(
            "copy_weights needs session_id and model_seq_id, or destination_project_id"
        )
    target = TinkerPath(model_id_for(session_id, seq), source.kind, source.name)
    await client.catalog.copy(source, target, session_id, body.ttl_seconds)
    return {"tinker_path": str(target)}
