"""Tasks of a dataset: with a reward function `(prompt, completion, row) -> float`, or with an environment of skyrl-gym."""

import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_actors.config.environments import CustomEnv, GymEnv, RewardEnv
from skyrl_actors.jobs.datasets import Part, Row, in_row, read, split_off
from skyrl_actors.jobs.environment import Environment, Message, Step, TaskSet, in_thread
from skyrl_actors.messages.errors import ConfigError

RewardFunction = Callable[[str, str, Row], Any]


def load_function(text: str) -> Any:
    """`module:name` or `path/to/file.py:name`. Raises ConfigError saying which part is missing."""
    place, _, name = text.rpartition(":")
    try:
        if place.endswith(".py"):
            name_of_module = f"{Path(place).stem}_of_job"
            spec = importlib.util.spec_from_file_location(name_of_module, place)
            if spec is None or spec.loader is None or not Path(place).is_file():
                raise ConfigError(f"{text}: there is no file {place}")
            module = sys.modules[name_of_module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            if (here := str(Path.cwd())) not in sys.path:
                sys.path.insert(0, here)
            module = importlib.import_module(place)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{text} can not be loaded: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{text}: {place} has no function or class {name}")
    return found


def messages_of(prompt: Any, where: str) -> tuple[Message, ...]:
    """A text is one user's turn; a list is a chat."""
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    if isinstance(prompt, list) and prompt and all(_is_message(m) for m in prompt):
        return tuple({"role": m["role"], "content": m["content"]} for m in prompt)
    raise ConfigError(f"{where}: a prompt is a text or a list of {{role, content}} with texts in them, not {str(prompt)[:80]!r}")


def answer_of(value: Any, where: str) -> str:
    """A text; or, as preference sets have it, a chat whose last turn it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_message(m) for m in value) and value[-1]["role"] == "assistant":
        return value[-1]["content"]
    raise ConfigError(f"{where}: an answer is a text, or a chat that ends with the assistant's turn, not {str(value)[:80]!r}")


def _is_message(found: Any) -> bool:
    return isinstance(found, Mapping) and isinstance(found.get("role"), str) and isinstance(found.get("content"), str)


class RewardEpisode:
    def __init__(self, messages: tuple[Message, ...], row: Row, reward: RewardFunction):
        self._messages = messages
        self._row = row
        self._reward = reward

    async def start(self) -> Sequence[Message]:
        return self._messages

    async def step(self, answer: str) -> Step:
        found = await in_thread(self._reward, self._messages[-1]["content"], answer, self._row)
        return Step(float(await found if inspect.isawaitable(found) else found))

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
            raise ValueError("its postprocessed_action is another answer than was sampled, and what was sampled is learned from")
        return Step(float(done["reward"]), bool(done["done"]), tuple(done["observations"]))

    async def close(self) -> None:
        if self._env is not None:
            await in_thread(self._env.close)


@dataclass(frozen=True, slots=True)
class DatasetTask:
    question: str
    answer: str
    row: Row
    episode: Callable[[Row], Environment]

    def open(self) -> Environment:
        return self.episode(self.row)


class DatasetTasks:
    """Rows in an order that follows from the seed; each comes up once before any comes up again."""

    def __init__(self, tasks: Sequence[DatasetTask], evaluation: Sequence[DatasetTask], seed: int):
        self.evaluation = evaluation
        self._tasks = tasks
        self._seed = seed

        self._shuffled = -1  # the epoch of `order`
        self._order: list[int] = []

    def batch(self, count: int, number: int) -> list[DatasetTask]:
        """Tasks number·count … of the shuffled rows, epoch behind epoch."""
        return [self._at(number * count + i) for i in range(count)]

    def _at(self, index: int) -> DatasetTask:
        epoch, place = divmod(index, len(self._tasks))
        if self._shuffled != epoch:
            self._shuffled = epoch
            self._order = random.Random(f"{self._seed} {epoch}").sample(range(len(self._tasks)), len(self._tasks))
        return self._tasks[self._order[place]]


def reward_tasks(config: RewardEnv, seed: int) -> DatasetTasks:
    needed = [config.prompt_column, *([config.answer_column] if config.answer_column else [])]
    reward: RewardFunction = load_function(config.reward)

    def task(row: Row) -> DatasetTask:
        messages = messages_of(row[config.prompt_column], f"column {config.prompt_column}")
        answer = str(row[config.answer_column]) if config.answer_column else ""
        return DatasetTask(messages[-1]["content"], answer, row, lambda row: RewardEpisode(messages, row, reward))

    return _task_set(config, needed, task, seed)


def gym_tasks(config: GymEnv, seed: int) -> DatasetTasks:
    make = _gym_maker(config)

    def task(row: Row) -> DatasetTask:
        messages = messages_of(row[config.prompt_column], f"column {config.prompt_column}")
        spec = row.get("reward_spec")
        answer = str(spec.get("ground_truth", "")) if isinstance(spec, Mapping) else ""
        return DatasetTask(messages[-1]["content"], answer, row, lambda row: GymEpisode(make, messages, row))

    tasks = _task_set(config, [config.prompt_column], task, seed)
    make(tasks.evaluation[0].row)  # a wrong id, or rows it can not use, are found before anything starts
    return tasks


def _gym_maker(config: GymEnv) -> Callable[[Row], Any]:
    try:
        import skyrl_gym
    except ImportError:
        raise ConfigError("env.type skyrl_gym needs the package skyrl-gym: pip install 'skyrl-actors[gym]'") from None
    from omegaconf import OmegaConf

    settings = OmegaConf.create(config.config)
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
                f"env.id {config.id} can not be made of a row with columns {', '.join(sorted(row))}: {error!r}"
            ) from None

    return make


def _task_set(config: RewardEnv | GymEnv, needed: Sequence[str], task: Callable[[Row], DatasetTask], seed: int) -> DatasetTasks:
    train, held_out = split_off(read(config.data, needed), config.eval_data, needed, config.eval_prompts, config.data.path)

    def tasks(part: Part) -> list[DatasetTask]:
        return [in_row(number, lambda: task(row), part.source) for number, row in part.numbered()]  # noqa: B023

    return DatasetTasks(tasks(train), tasks(held_out), seed)


def custom_tasks(config: CustomEnv, seed: int) -> TaskSet:
    """What the user's own function makes. Raises ConfigError when it fails or gives no task set."""
    make = load_function(config.tasks)
    try:
        made = make(seed=seed, **config.options)
    except Exception as error:
        raise ConfigError(f"{config.tasks} raised {type(error).__name__}: {error}") from error
    if not callable(getattr(made, "batch", None)) or not getattr(made, "evaluation", None):
        raise ConfigError(
            f"{config.tasks} gave a {type(made).__name__}; a task set has batch(count, number) and tasks in evaluation"
        )
    return made
