"""Two deterministic training loops of an unmodified SDK client.

They are supervised training, and PPO with a critic. Each runs until `done(step)` is true, and saves
its models as checkpoints. PPO takes its behaviour logprobs from the trainer's forward, so the
engine only determines the sampled tokens.
"""

import hashlib
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from safetensors import safe_open
from tinker import types

from examples.ppo_critic import sample, score, update
from examples.words import MODEL, Chat, tensor, words

Done = Callable[[int], bool]


class Answers:
    """The arrival times of a loop's answers, in seconds since the epoch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, future):
        result = future.result()
        self.times.append(time.time())
        return result

    def after(self, moment: float, end: float) -> tuple[float, float]:
        """Return the seconds to the next answer, and the longest wait for an answer until `end`."""
        times = [t for t in self.times if t > moment]
        if not times:
            return 0.0, 0.0
        until = [t for t in times if t <= end] or times[:1]
        gaps = [b - a for a, b in pairwise([moment, *until])]
        return until[0] - moment, max(gaps)


class Noted:
    """A future of the SDK that records the time of its answer."""

    def __init__(self, future: Any, answers: Answers):
        self._future, self._answers = future, answers

    def result(self) -> Any:
        return self._answers(self._future)


class Recorded:
    """A client of the SDK whose futures are all `Noted`."""

    def __init__(self, client: Any, answers: Answers):
        self._client, self._answers = client, answers

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = method(*args, **kwargs)
            return Noted(found, self._answers) if hasattr(found, "result") else found

        return call


def sft_batch(chat: Chat, step: int, rows: int = 8) -> list[types.Datum]:
    data = []
    for text in words(rows, seed=step):
        prompt, answer = chat.prompt(text), chat.answer(text)
        tokens = prompt + answer
        weights = [0.0] * (len(prompt) - 1) + [1.0 / rows] * len(answer)
        inputs = {"target_tokens": tensor(tokens[1:], "int64"), "weights": tensor(weights)}
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        )
    return data


def sft(
    service: tinker.ServiceClient, name: str, done: Done, answers: Answers
) -> tuple[int, list[str]]:
    """Train with two forward_backwards in each step.

    Return the steps and the saved states' paths.
    """
    model = answers(service.create_lora_training_client(MODEL, rank=16, seed=7))
    chat, step = Chat(model.get_tokenizer()), 0
    while not done(step):
        first = model.forward_backward(sft_batch(chat, 2 * step), "cross_entropy")
        second = model.forward_backward(sft_batch(chat, 2 * step + 1), "cross_entropy")
        stepped = model.optim_step(
            types.AdamParams(learning_rate=1e-3, eps=1e-8, grad_clip_norm=1.0)
        )
        for future in (first, second, stepped):
            answers(future)
        step += 1
    return step, [answers(model.save_state(f"{name}-sft")).path]


def ppo(
    service: tinker.ServiceClient, name: str, done: Done, answers: Answers
) -> tuple[int, list[str]]:
    def made(rank: int, seed: int, **metadata: str) -> Any:
        return Recorded(
            answers(
                service.create_lora_training_client(
                    MODEL, rank=rank, seed=seed, user_metadata=metadata
                )
            ),
            answers,
        )

    policy, critic, reference = made(16, 0), made(16, 1, model_role="critic"), made(1, 2)
    chat, step = Chat(policy.get_tokenizer()), 0
    while not done(step):
        sampler = Recorded(policy.save_weights_and_get_sampling_client().result(), answers)
        tasks = words(6, seed=1000 + step)
        rows = sample(sampler, chat, tasks, 4, seed=step)  # pyright: ignore[reportArgumentType]
        score(rows, policy, critic, reference)
        update(rows, policy, critic, (1e-3, 3e-3), seed=step)
        step += 1
    return step, [
        m.save_state(f"{name}-{role}").result().path
        for role, m in (("policy", policy), ("critic", critic))
    ]


LOOPS = {"sft": sft, "ppo": ppo}


def tensors_of(checkpoint_dir: Path, path: str) -> dict[str, np.ndarray]:
    """Return all tensors of a checkpoint, weights and moments, by file and name."""
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    folder = checkpoint_dir / model_id.replace(":", "_") / kind / name
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "numpy") as stream:
            keys = stream.keys()
            found |= {f"{file.name}:{key}": stream.get_tensor(key) for key in keys}
    return found


def digest(tensors: dict[str, np.ndarray]) -> str:
    total = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        total.update(name.encode() + array.tobytes())
    return total.hexdigest()


def difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Return the largest absolute difference, or infinity if the names differ."""
    if a.keys() != b.keys():
        return float("inf")
    return max(
        float(np.abs(a[name].astype(np.float64) - b[name].astype(np.float64)).max()) for name in a
    )
