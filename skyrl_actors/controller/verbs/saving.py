"""What the three kinds of saving have in common: checks, and a folder that is written once."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from skyrl_actors.controller.operations import Op
from skyrl_actors.controller.tenants import Model
from skyrl_actors.controller.verbs.verb import VerbContext
from skyrl_actors.messages.catalog import LONGEST_TTL_S
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import CheckpointForm
from skyrl_actors.messages.paths import TinkerPath
from skyrl_actors.storage import age_files


def check_ttl(ttl_seconds: int | None) -> None:
    """Raise InvalidRequest for a lifetime out of range. None is allowed."""
    if ttl_seconds is not None and not 1 <= ttl_seconds <= LONGEST_TTL_S:
        raise InvalidRequest(
            f"ttl_seconds {ttl_seconds}: use 1 to {LONGEST_TTL_S} (100 years), "
            "or leave it out to keep the checkpoint"
        )


async def save(
    op: Op,
    model: Model,
    path: TinkerPath,
    context: VerbContext,
    *,
    form: CheckpointForm,
    overwrite: bool = False,
    user_metadata: Mapping[str, str],
    ttl_seconds: int | None,
    recipients: Sequence[str] = (),
) -> Path:
    """Write a checkpoint, unless this request has written it already. Return its folder.

    With `recipients` its files are encrypted before they are copied anywhere. Raises CapacityError
    when the API key's quota of bytes is used.
    """
    folder, is_saved = await context.disk.read(
        context.folders.to_save, path, overwrite, op.request_id
    )
    if not is_saved:
        await context.storage.check(path.model_id)
        await context.backend.save_checkpoint(
            model.spec, op.reading, str(folder), form=form, mark=op.request_id
        )
    if recipients:
        files = await context.disk.read(context.folders.files_for_others, path)
        await context.disk.write("whole checkpoints", age_files.encrypt, files, recipients)
    await context.disk.note(
        path.model_id, context.folders.note, folder, dict(user_metadata), ttl_seconds
    )
    return folder
