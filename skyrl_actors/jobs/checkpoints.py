"""Checkpoints of a run: every so many steps, the newest few and the best; what can not be written is said, and the run goes on."""

from dataclasses import replace
from typing import Any, Protocol

from skyrl_actors.config.job import RunConfig
from skyrl_actors.jobs.run_folder import RunFolder, State
from skyrl_actors.jobs.session import Session
from skyrl_actors.messages.errors import InternalError, SkyrlActorsError
from skyrl_actors.messages.paths import parse_path

BEST = "best"


class Warned(Protocol):
    def warned(self, text: str) -> None: ...


class Checkpoints:
    def __init__(self, folder: RunFolder, config: RunConfig, watcher: Warned):
        self._folder = folder
        self._config = config
        self._watcher = watcher
        self.state = folder.state or State(0, {}, {})

    @property
    def resumed(self) -> bool:
        return self._folder.state is not None

    async def after(self, session: Session, step: int, models: dict[str, str], job: dict[str, Any]) -> None:
        """`models`: ids by their part in the run; `job`: its books, as JSON. Saves when the step's number says so."""
        if not self._config.checkpoint_every or step % self._config.checkpoint_every:
            return
        paths: dict[str, str] = {}
        try:
            for part, model_id in models.items():
                paths[part] = (await session.save(model_id, f"step-{step}")).path
            kept = [*self.state.checkpoints, {"step": step, "models": paths}]
            older, newest = kept[: -self._config.keep_checkpoints], kept[-self._config.keep_checkpoints :]
            state = State(step, paths, job, self.state.best, newest)
            self._folder.keep(state)
        except (InternalError, OSError) as error:
            self._watcher.warned(
                f"no checkpoint of step {step}: {error}. The run goes on; the last whole one is of step {self.state.step}"
            )
            await self._delete(session, *paths.values())
            return
        self.state = state
        for checkpoint in older:
            await self._delete(session, *checkpoint["models"].values())

    async def evaluated(self, session: Session, step: int, model_id: str, value: float, higher_is_better: bool) -> None:
        """Keeps the weights of the best evaluation."""
        best = self.state.best
        better = not best or (value > best["value"] if higher_is_better else value < best["value"])
        if not self._config.keep_best or not better:
            return
        try:
            saved = await session.save(model_id, f"{BEST}-{step}")
            state = replace(self.state, best={"step": step, "value": value, "path": saved.path, "folder": saved.folder})
            if state.models:
                self._folder.keep(state)
        except (InternalError, OSError) as error:
            self._watcher.warned(f"the best weights so far, of step {step}, could not be kept: {error}")
            return
        self.state = state
        if best:
            await self._delete(session, best["path"])

    async def _delete(self, session: Session, *paths: str) -> None:
        for path in paths:
            try:
                await session.client.catalog("delete", parse_path(path))
            except SkyrlActorsError as error:
                self._watcher.warned(f"an old checkpoint could not be removed: {error}")
