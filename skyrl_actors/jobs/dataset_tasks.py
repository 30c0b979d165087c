"""Make tasks from the rows of a dataset.

The reward comes from a function `(prompt, completion, row) -> float` or from an environment of
skyrl-gym. A task set can also come from a function of the user.
"""

import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_actors.config.environments import CustomEnv, DatasetEnv, GymEnv, RewardEnv
from skyrl_actors.jobs.chat_messages import text_of
from skyrl_actors.jobs.chat_rows import messages_of
from skyrl_actors.jobs.datasets import DatasetPart, Row, in_row, read, split_off
from skyrl_actors.jobs.environment import (
    Environment,
    Message,
    Step,
    TaskSet,
    check_reward,
    in_thread,
)
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.narrowing import is_mapping

RewardFunction = Callable[[str, str, Row], Any]


def load_function(text: str) -> Any:
    """Import the function or class that `module:name` or `path/to/file.py:name` names.

    Raises:
        ConfigError: The file, the module or the name does not exist, or the import fails.
    """
    place, _, name = text.rpartition(":")
    try:
        if place.endswith(".py"):
            name_of_module = f"{Path(place).stem}_of_job"
            spec = importlib.util.spec_from_file_location(name_of_module, place)
            if spec is None or spec.loader is None or not Path(place).is_file():
                raise ConfigError(f"{text}: the file {place} does not exist")
            module = sys.modules[name_of_module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            if (here := str(Path.cwd())) not in sys.path:
                sys.path.insert(0, here)
            module = importlib.import_module(place)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{text} cannot be loaded: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{text}: {place} has no function or class {name}")
    return found


class RewardEpisode:
    """An episode of one turn that a reward function scores."""

    def __init__(self, messages: tuple[Message, ...], row: Row, reward: RewardFunction):
        self._messages = messages
        self._row = row
        self._reward = reward

    async def start(self) -> Sequence[Message]:
        return self._messages

    async def step(self, answer: str) -> Step:
        found = await in_thread(self._reward, text_of(self._messages[-1]), answer, self._row)
        reward: Any = await found if inspect.isawaitable(found) else found
        check_reward(reward)
        return Step(float(reward))

    async def close(self) -> None:
        pass


class GymEpisode:
    """One environment of skyrl-gym: `init`, `step` until done, `close`."""

    def __init__(self, make: Callable[[Row], Any], messages: tuple[Message, ...], row: Row):
        self._make = make
        self._messages = messages
        self._row = row
        self._env: Any = None

    async def start(self) -> Sequence[Message]:
        self._env = await in_thread(self._make, self._row)
        messages, _ = await in_thread(self._env.init, [dict(m) for m in self._messages])
        return messages

    async def step(self, answer: str) -> Step:
        done = await in_thread(self._env.step, answer)
        if done.get("postprocessed_action") not in (None, answer):
            raise ValueError(
                "postprocessed_action differs from the sampled answer; "
                "training needs the sampled answer"
            )
        return Step(float(done["reward"]), bool(done["done"]), tuple(done["observations"]))

    async def close(self) -> None:
        if self._env is not None:
            await in_thread(self._env.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetTask:
    """A task made from one row."""

    question: str
    answer: str
    row: Row
    episode: Callable[[Row], Environment]

    def open(self) -> Environment:
        return self.episode(self.row)


class DatasetTasks:
    """Tasks in an order that depends on the seed. Each epoch contains every task once."""

    def __init__(self, tasks: Sequence[DatasetTask], evaluation: Sequence[DatasetTask], seed: int):
        self.evaluation = evaluation
        self._tasks = tasks
        self._seed = seed

        self._shuffled = -1  # the epoch that `_order` belongs to
        self._order: list[int] = []

    def batch(self, count: int, number: int) -> list[DatasetTask]:
        """Return `count` tasks from position number·count of the concatenated epochs."""
        return [self._at(number * count + i) for i in range(count)]

    def _at(self, index: int) -> DatasetTask:
        epoch, place = divmod(index, len(self._tasks))
        if self._shuffled != epoch:
            self._shuffled = epoch
            self._order = random.Random(f"{self._seed} {epoch}").sample(
                range(len(self._tasks)), len(self._tasks)
            )
        return self._tasks[self._order[place]]


def reward_tasks(config: RewardEnv, seed: int) -> DatasetTasks:
    """Make tasks that a reward function scores.

    Raises:
        ConfigError: The function or a row cannot be used.
    """
    needed = [config.prompt_column, *([config.answer_column] if config.answer_column else [])]
    reward: RewardFunction = load_function(config.reward)

    def task(row: Row) -> DatasetTask:
        messages = _messages(config, row)
        answer = str(row[config.answer_column]) if config.answer_column else ""
        return DatasetTask(
            question=text_of(messages[-1]),
            answer=answer,
            row=row,
            episode=lambda row: RewardEpisode(messages, row, reward),
        )

    return _task_set(config, needed, task, seed)


def _messages(config: DatasetEnv, row: Row) -> tuple[Message, ...]:
    images = row[config.images_column] if config.images_column else None
    return messages_of(row[config.prompt_column], f"column {config.prompt_column}", images)


def gym_tasks(config: GymEnv, seed: int) -> DatasetTasks:
    """Make tasks around an environment of skyrl-gym.

    Raises:
        ConfigError: The environment does not exist or cannot be made from a row.
    """
    make = _gym_maker(config)

    def task(row: Row) -> DatasetTask:
        messages = _messages(config, row)
        spec = row.get("reward_spec")
        answer = str(spec.get("ground_truth", "")) if is_mapping(spec) else ""
        return DatasetTask(
            question=text_of(messages[-1]),
            answer=answer,
            row=row,
            episode=lambda row: GymEpisode(make, messages, row),
        )

    tasks = _task_set(config, [config.prompt_column], task, seed)
    # Detect a wrong id or unusable rows before anything starts.
    make(tasks.evaluation[0].row)
    return tasks


def _gym_maker(config: GymEnv) -> Callable[[Row], Any]:
    try:
        import skyrl_gym
    except ImportError:
        raise ConfigError(
            "env.type skyrl_gym needs the package skyrl-gym: pip install 'skyrl-actors[gym]'"
        ) from None
    from omegaconf import OmegaConf

    settings = OmegaConf.create(config.options)
    kind = load_function(config.id) if ":" in config.id else None

    def make(row: Row) -> Any:
        extras = {"max_turns": config.max_turns, **row}
        try:
            if kind is not None:
                return kind(env_config=settings, extras=extras)
            return skyrl_gym.make(config.id, env_config=settings, extras=extras)
        except skyrl_gym.error.Error as error:
            raise ConfigError(f"env.id {config.id}: {error}") from None
        except (AssertionError, KeyError, TypeError) as error:
            raise ConfigError(
                f"env.id {config.id} cannot be made from a row with the columns "
                f"{', '.join(sorted(row))}: {error!r}"
            ) from None

    return make


def _task_set(
    config: RewardEnv | GymEnv, needed: Sequence[str], task: Callable[[Row], DatasetTask], seed: int
) -> DatasetTasks:
    train, held_out = split_off(
        read(config.data, needed, config.images_column),
        config.eval_data,
        needed,
        config.eval_prompts,
        config.data.path,
        config.images_column,
    )

    def tasks(part: DatasetPart) -> list[DatasetTask]:
        return [
            in_row(number, lambda: task(row), part.source)  # noqa: B023
            for number, row in part.numbered()
        ]

    return DatasetTasks(tasks(train), tasks(held_out), seed)


def custom_tasks(config: CustomEnv, seed: int) -> TaskSet:
    """Call the user's function that makes a task set.

    Raises:
        ConfigError: The function fails or does not return a task set.
    """
    make = load_function(config.tasks)
    try:
        made = make(seed=seed, **config.options)
    except Exception as error:
        raise ConfigError(f"{config.tasks} raised {type(error).__name__}: {error}") from error
    if not callable(getattr(made, "batch", None)) or not getattr(made, "evaluation", None):
        raise ConfigError(
            f"{config.tasks} returned a {type(made).__name__}; "
            "a task set has a method batch(count, number) and a non-empty sequence evaluation"
        )
    return made
