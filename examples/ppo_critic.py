"""PPO with a critic, GAE and a KL penalty, with the official tinker SDK.

The critic is a training client created with user_metadata={"model_role": "critic"}.
Start a service first:

    skyrl-actors serve configs/cpu_tiny.yaml

    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
    python -m examples.ppo_critic
"""

import argparse
from dataclasses import dataclass, field

import numpy as np
import tinker
from tinker import types

from examples.words import MODEL, Chat, accuracy, tensor, words

GAMMA, LAMBDA, KL_COEF = 1.0, 0.95, 0.01


@dataclass
class Row:
    """One sampled answer. Arrays [R] hold one value for each of its tokens."""

    prompt: list[int]
    answer: list[int]
    sampled_logprobs: np.ndarray  # [R] of the engine
    reward: float
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0))
    values: np.ndarray = field(default_factory=lambda: np.zeros(0))
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0))
    returns: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def datum(self, with_targets: bool = True, **per_token: np.ndarray) -> types.Datum:
        """Return a training example. Fields [R] are 0 at prompt positions."""
        tokens = self.prompt + self.answer
        pad = np.zeros(len(self.prompt) - 1)
        inputs = {
            name: tensor(np.concatenate([pad, values]).tolist())
            for name, values in per_token.items()
        }
        if with_targets:
            inputs["target_tokens"] = tensor(tokens[1:], "int64")
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
        )


def sample(
    sampler: tinker.SamplingClient, chat: Chat, texts: list[str], group: int, seed: int
) -> list[Row]:
    futures = []
    for i, text in enumerate(texts):
        params = types.SamplingParams(
            max_tokens=10, temperature=1.0, seed=seed * 10_000 + i * group
        )
        futures.append(sampler.sample(types.ModelInput.from_ints(chat.prompt(text)), group, params))
    return [
        Row(chat.prompt(text), s.tokens, np.asarray(s.logprobs), chat.is_right(text, s))
        for text, future in zip(texts, futures, strict=True)
        for s in future.result().sequences
    ]


def score(
    rows: list[Row],
    policy: tinker.TrainingClient,
    critic: tinker.TrainingClient,
    reference: tinker.TrainingClient,
) -> float:
    """Compute logprobs, values, advantages and returns of the rows.

    The result is the mean of log p − log p_ref over all tokens.
    """
    data = [row.datum() for row in rows]
    futures = [
        m.forward(data, loss)
        for m, loss in (
            (policy, "cross_entropy"),
            (critic, "ppo_critic"),
            (reference, "cross_entropy"),
        )
    ]
    outputs = [future.result().loss_fn_outputs for future in futures]
    differences = []
    for row, p, v, r in zip(rows, *outputs, strict=True):
        start = len(row.prompt) - 1
        row.logprobs = np.asarray(p["logprobs"].data[start:])
        row.values = np.asarray(v["values"].data[start:])
        difference = row.logprobs - np.asarray(r["logprobs"].data[start:])
        differences.append(difference)
        rewards = -KL_COEF * difference
        rewards[-1] += row.reward
        row.advantages, following = np.zeros(len(rewards)), 0.0
        for t in reversed(range(len(rewards))):
            next_value = row.values[t + 1] if t + 1 < len(rewards) else 0.0
            following = rewards[t] + GAMMA * next_value - row.values[t] + GAMMA * LAMBDA * following
            row.advantages[t] = following
        row.returns = row.advantages + row.values
    every = np.concatenate([row.advantages for row in rows])
    for row in rows:
        row.advantages = (row.advantages - every.mean()) / (every.std() + 1e-8)
    return float(np.concatenate(differences).mean())


def update(
    rows: list[Row],
    policy: tinker.TrainingClient,
    critic: tinker.TrainingClient,
    rates: tuple[float, float],
    seed: int,
) -> dict:
    pending = []
    order = np.random.default_rng(seed).permutation(len(rows))
    for part in [p for _ in range(2) for p in np.array_split(order, 4)]:
        chosen = [rows[i] for i in part]
        # Losses are sums. Dividing the inputs by the count gives the mean over tokens.
        count = sum(len(row.answer) for row in chosen)
        policy_data = [
            row.datum(logprobs=row.logprobs, advantages=row.advantages / count) for row in chosen
        ]
        critic_data = [
            row.datum(
                False,
                values=row.values,
                returns=row.returns,
                weights=np.full(len(row.answer), 1 / count),
            )
            for row in chosen
        ]
        for model, data, loss, rate in (
            (policy, policy_data, "ppo", rates[0]),
            (critic, critic_data, "ppo_critic", rates[1]),
        ):
            batch = model.forward_backward(data, loss)  # type: ignore[arg-type]
            step = model.optim_step(
                types.AdamParams(learning_rate=rate, eps=1e-8, grad_clip_norm=1.0)
            )
            pending.append((loss, count, batch, step))
    sums = {"ppo": 0.0, "ppo_critic": 0.0}
    tokens = 0
    for loss, count, batch, step in pending:
        key = "clipped_tokens:sum" if loss == "ppo" else "squared_error:sum"
        sums[loss] += batch.result().metrics[key]
        tokens += count * (loss == "ppo")
        step.result()
    return {"clip": sums["ppo"] / tokens, "value_loss": sums["ppo_critic"] / tokens}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--policy-rate", type=float, default=1e-3)
    parser.add_argument("--critic-rate", type=float, default=3e-3)
    parser.add_argument("--base-model", default=MODEL, help="what the service was started with")
    options = parser.parse_args()
    held_out = words(100, seed=1)
    with tinker.ServiceClient() as service:
        policy = service.create_lora_training_client(options.base_model, rank=32, seed=0).result()
        critic = service.create_lora_training_client(
            options.base_model, rank=32, seed=1, user_metadata={"model_role": "critic"}
        ).result()
        # An adapter that is never trained is equal to the base model.
        reference = service.create_lora_training_client(options.base_model, rank=1, seed=2).result()
        chat = Chat(policy.get_tokenizer())
        sampler = policy.save_weights_and_get_sampling_client().result()
        print(f"held-out accuracy before: {accuracy(sampler, chat, held_out):.2f}", flush=True)
        for i in range(options.iterations):
            texts = [w for w in words(options.prompts, seed=1000 + i) if w not in held_out]
            rows = sample(sampler, chat, texts, options.group, seed=i)
            kl = score(rows, policy, critic, reference)
            mismatch = np.mean([np.abs(row.logprobs - row.sampled_logprobs).mean() for row in rows])
            share = 1 - i / options.iterations
            metrics = update(
                rows,
                policy,
                critic,
                (share * options.policy_rate, share * options.critic_rate),
                seed=i,
            )
            sampler = policy.save_weights_and_get_sampling_client().result()
            reward = np.mean([row.reward for row in rows])
            print(
                f"iteration {i + 1:2d}  reward {reward:.3f}  kl {kl:.3f}  "
                f"value loss {metrics['value_loss']:.4f}  clip {metrics['clip']:.3f}  "
                f"mismatch {mismatch:.1e}",
                flush=True,
            )
        print(f"held-out accuracy after:  {accuracy(sampler, chat, held_out):.2f}")


if __name__ == "__main__":
    main()
