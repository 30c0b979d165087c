"""Save checkpoints of a run every few steps, and keep the newest ones and the best one.

A checkpoint that cannot be written causes a warning. The run continues.
"""

from dataclasses import replace
from typing import Any, Protocol

from skyrl_actors.config.job import RunConfig
from skyrl_actors.jobs.run_folder import RunFolder, SavedModels, State
from skyrl_actors.jobs.session import ServiceSession
from skyrl_actors.messages.errors import InternalError, SkyrlActorsError
from skyrl_actors.messages.paths import parse_path

BEST = "best"


class WarningSink(Protocol):
    """An object that shows warnings to the user."""

    def warned(self, text: str) -> None: ...


class Checkpoints:
    """The checkpoints of one run; `state` is the newest one, or an empty state at step 0."""

    def __init__(self, folder: RunFolder, config: RunConfig, watcher: WarningSink):
        self._folder = folder
        self._config = config
        self._watcher = watcher
        self.state = folder.state or State(step=0, models={}, job={})

    @property
    def resumed(self) -> bool:
        """Whether the run continues from a checkpoint."""
        return self._folder.state is not None

    async def after(
        self, session: ServiceSession, step: int, models: dict[str, str], job: dict[str, Any]
    ) -> None:
        """Save a checkpoint if this step is a multiple of `checkpoint_every`.

        `models` maps the name of each model to its id. `job` is the job's progress, as JSON.
        """
        if not self._config.checkpoint_every or step % self._config.checkpoint_every:
            return
        paths: dict[str, str] = {}
        try:
            for part, model_id in models.items():
                paths[part] = (await session.save(model_id, f"step-{step}")).path
            kept = [*self.state.checkpoints, SavedModels(step=step, models=paths)]
            older, newest = (
                kept[: -self._config.keep_checkpoints],
                kept[-self._config.keep_checkpoints :],
            )
            state = State(
                step=step, models=paths, job=job, best=self.state.best, checkpoints=newest
            )
            self._folder.keep(state)
        except (InternalError, OSError) as error:
            self._watcher.warned(
                f"no checkpoint of step {step}: {error}. "
                f"The run continues; the last complete checkpoint is of step {self.state.step}"
            )
            await self._delete(session, *paths.values())
            return
        self.state = state
        for checkpoint in older:
            await self._delete(session, *checkpoint["models"].values())

    async def evaluated(
        self,
        session: ServiceSession,
        step: int,
        model_id: str,
        value: float,
        higher_is_better: bool,
    ) -> None:
        """Save the weights if this evaluation is the best so far."""
        best = self.state.best
        better = not best or (value > best["value"] if higher_is_better else value < best["value"])
        if not better:
            return
        try:
            saved = await session.save(model_id, f"{BEST}-{step}")
            state = replace(
                self.state,
                best={"step": step, "value": value, "path": saved.path, "folder": saved.folder},
            )
            if state.models:
                self._folder.keep(state)
        except (InternalError, OSError) as error:
            self._watcher.warned(
                f"the best weights so far, of step {step}, could not be saved: {error}"
            )
            return
        self.state = state
        if best:
            await self._delete(session, best["path"])

    async def _delete(self, session: ServiceSession, *paths: str) -> None:
        for path in paths:
            try:
                await session.client.catalog.delete(parse_path(path))
            except SkyrlActorsError as error:
                self._watcher.warned(f"the old checkpoint {path} could not be deleted: {error}")
