"""Who asks, and what he may see: his own, and what others published.

Every id that the service makes for the holder of a key bears the owner's mark, and what belongs to it bears that id: models,
samplers, runs, checkpoints, requests. So ownership is read from the id, and needs no table.
"""

from dataclasses import dataclass

from fastapi import Request

from skyrl_actors.api.state import ApiState, state_of
from skyrl_actors.api.tokens import owner_of_credential
from skyrl_actors.messages.errors import NotFound
from skyrl_actors.messages.paths import TinkerPath, owner_mark, owner_of


@dataclass(frozen=True, slots=True)
class Caller:
    """`owner` None: no keys are configured, and everything is everybody's."""

    owner: str | None = None

    @property
    def mark(self) -> str:
        return "" if self.owner is None else owner_mark(self.owner)

    def owns(self, text: str) -> bool:
        return self.owner is None or owner_of(text) == self.owner

    def own(self, text: str, what: str) -> str:
        """The id, when it is his. What is another's is answered as what never was."""
        if not self.owns(text):
            raise NotFound(f"unknown {what} {text[:200]!r}")
        return text


def caller_of(request: Request) -> Caller:
    return request.state.caller


async def readable(request: Request, path: TinkerPath, token: str | None = None) -> TinkerPath:
    """The path, when the caller may read it: his own, a published one, or one of the account whose key `token` is."""
    state, caller = state_of(request), caller_of(request)
    given_by = owner_of_credential(state, token) if token else None
    is_theirs = given_by is not None and owner_of(path.model_id) == given_by
    if caller.owns(path.model_id) or is_theirs or await is_public(state, path):
        return path
    raise NotFound(f"no checkpoint {path}")


async def is_public(state: ApiState, path: TinkerPath) -> bool:
    return path.kind != "steps" and await state.client.catalog("is_public", path)
