"""The task of the examples: write a short word backwards."""

import random

from tinker import types

MODEL = "skyrl-actors/tiny"
LETTERS = "abcdefghijkl"


def word(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 5)))


def words(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [word(rng) for _ in range(count)]


class Chat:
    """Converts words to the tokens of a chat, and scores answers."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def prompt(self, text: str) -> list[int]:
        turn = [{"role": "user", "content": f"Reverse: {text}"}]
        prompt = self.tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer.encode(prompt, add_special_tokens=False)

    def answer(self, text: str) -> list[int]:
        return [
            *self.tokenizer.encode(text[::-1], add_special_tokens=False),
            self.tokenizer.eos_token_id,
        ]

    def is_right(self, text: str, sequence: types.SampledSequence) -> float:
        answer = self.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        return float(sequence.stop_reason == "stop" and answer == text[::-1])


def accuracy(sampler, chat: Chat, held_out: list[str]) -> float:
    """Return the accuracy of greedy answers to held-out words."""
    params = types.SamplingParams(max_tokens=8, temperature=0.0)
    futures = [
        sampler.sample(types.ModelInput.from_ints(chat.prompt(w)), 1, params) for w in held_out
    ]
    return sum(
        chat.is_right(w, f.result().sequences[0]) for w, f in zip(held_out, futures, strict=True)
    ) / len(held_out)


def tensor(values, dtype: str = "float32") -> types.TensorData:
    return types.TensorData(data=list(values), dtype=dtype, shape=[len(values)])
