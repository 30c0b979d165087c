"""Decide which objects a caller may see: the caller's own and published ones.

Every id that the service creates for an API key contains the owner's mark. Models, samplers, runs,
checkpoints and requests contain such an id. So ownership is read from the id and needs no table.
"""

from contextlib import suppress
from dataclasses import dataclass

from fastapi import Request

from skyrl_actors.api.credentials import Grant
from skyrl_actors.api.state import ApiState, state_of
from skyrl_actors.api.tokens import grant_of_credential
from skyrl_actors.messages.errors import Corrupt, NotFound, UserError
from skyrl_actors.messages.keys import Act, Role
from skyrl_actors.messages.paths import TinkerPath, is_id, owner_mark, owner_of


class NotAllowed(UserError):
    """The role of the API key does not allow this request."""

    status = 403


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. `grant` None: no keys are required and all may see everything."""

    grant: Grant | None = None

    @property
    def owner(self) -> str | None:
        return None if self.grant is None else self.grant.owner

    @property
    def role(self) -> Role:
        return "tenant" if self.grant is None else self.grant.role

    @property
    def mark(self) -> str:
        return "" if self.owner is None else owner_mark(self.owner)

    @property
    def scope(self) -> str | None:
        """The owner whose objects the caller may see; None: those of all."""
        return None if self.role == "admin" else self.owner

    def owns(self, text: str) -> bool:
        return self.scope is None or owner_of(text) == self.scope

    def own(self, text: str, what: str) -> str:
        """Return the id if the caller owns it. Raises NotFound otherwise, as for an unknown id.

        What cannot be an id is unknown too: ids become parts of file paths.
        """
        if not (is_id(text) and self.owns(text)):
            raise NotFound(f"unknown {what} {text[:200]!r}")
        return text


def caller_of(request: Request) -> Caller:
    """Return the caller that the middleware found for this request."""
    return request.state.caller


async def readable(request: Request, path: TinkerPath, token: str | None = None) -> TinkerPath:
    """Return the path if the caller may read it. Raises NotFound otherwise.

    The caller may read its own paths, published ones, and those of the account of `token`.
    """
    state, caller = state_of(request), caller_of(request)
    grant = await grant_of_credential(state, token) if token else None
    is_shared = grant is not None and owner_of(path.model_id) == grant.owner
    await note_admin(request, "read", path.model_id, path)
    if caller.owns(path.model_id) or is_shared:
        return path
    if await is_public(state, path):
        await state.client.calls.note_access("read", caller.owner or "", str(path))
        return path
    raise NotFound(f"no checkpoint {path}")


async def note_admin(request: Request, act: Act, id_: str, path: TinkerPath | None = None) -> None:
    """Record an act of an admin on what another key owns: an id, or a path of this model.

    Raises NotFound, and records nothing, if there is no such checkpoint.
    """
    caller, calls = caller_of(request), state_of(request).client.calls
    if caller.role != "admin" or owner_of(id_) == caller.owner:
        return
    if path is not None:
        with suppress(Corrupt):  # then it is there
            await calls.checkpoint_spec(path)
    await calls.note_access(act, caller.owner or "", id_ if path is None else str(path))


async def is_public(state: ApiState, path: TinkerPath) -> bool:
    """Return whether the checkpoint is published. Past steps never are."""
    return path.kind != "steps" and await state.client.catalog.is_public(path)
