"""Supervised fine-tuning on images with the official tinker SDK: name coloured shapes.

Start a service first:

    skyrl-actors serve configs/cpu_tiny_vl.yaml

    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
    python -m examples.vision_sft
"""

import argparse
from collections.abc import Sequence
from typing import Any

import tinker
from tinker import types

from examples.words import tensor
from skyrl_actors.jobs.shapes import ShapeTask, shape_tasks

MODEL = "skyrl-actors/tiny-vl"
IMAGE_TOKENS = 4  # of a drawing of 32 x 32 pixels: its SDK reads `length` from it


class VisionChat:
    """Chats with an image, as chunks."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, task: ShapeTask) -> types.ModelInput:
        before = self.tokens("<|im_start|>user\n<|vision_start|>")
        after = self.tokens(f"<|vision_end|>{task.question}<|im_end|>\n<|im_start|>assistant\n")
        image = types.ImageChunk(data=task.image, format="png", expected_tokens=IMAGE_TOKENS)
        return types.ModelInput(
            chunks=[
                types.EncodedTextChunk(tokens=before),
                image,
                types.EncodedTextChunk(tokens=after),
            ]
        )

    def answer(self, text: str) -> list[int]:
        return self.tokens(f"{text}<|im_end|>")

    def datum(self, task: ShapeTask) -> types.Datum:
        """Return a training example. Targets and weights are 0 where the image is."""
        prompt, answer = self.prompt(task), self.answer(task.answer)
        known = prompt.length - 1
        return types.Datum(
            model_input=types.ModelInput(
                chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=answer[:-1])]
            ),
            loss_fn_inputs={
                "target_tokens": tensor([0] * known + answer, "int64"),
                "weights": tensor([0.0] * known + [1.0] * len(answer)),
            },
        )


def accuracy(sampler: tinker.SamplingClient, chat: VisionChat, tasks: Sequence[ShapeTask]) -> float:
    """Return the share of greedy answers that are right."""
    params = types.SamplingParams(max_tokens=20, temperature=0.0)
    futures = [sampler.sample(chat.prompt(task), 1, params) for task in tasks]
    right = 0.0
    for task, future in zip(tasks, futures, strict=True):
        (sequence,) = future.result().sequences
        right += task.reward(chat.tokenizer.decode(sequence.tokens, skip_special_tokens=True))
    return right / len(tasks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--base-model", default=MODEL, help="what the service was started with")
    options = parser.parse_args()
    held_out = list(shape_tasks(96, seed=1))
    with tinker.ServiceClient() as service:
        model = service.create_lora_training_client(options.base_model, rank=16, seed=0).result()
        chat = VisionChat(model.get_tokenizer())
        base = service.create_sampling_client(base_model=options.base_model).result()
        print(f"held-out accuracy before: {accuracy(base, chat, held_out):.2f}", flush=True)
        for step in range(options.steps):
            data = [chat.datum(task) for task in shape_tasks(options.batch, seed=100 + step)]
            batch = model.forward_backward(data, "cross_entropy")
            rate = options.learning_rate * (1 - step / options.steps)
            model.optim_step(types.AdamParams(learning_rate=rate, eps=1e-8)).result()
            tokens = sum(sum(d.loss_fn_inputs["weights"].data) for d in data)
            if step % 5 == 4:
                print(
                    f"step {step + 1:3d}  loss {batch.result().metrics['loss:sum'] / tokens:.3f}",
                    flush=True,
                )
        sampler = model.save_weights_and_get_sampling_client().result()
        print(f"held-out accuracy after:  {accuracy(sampler, chat, held_out):.2f}")
        print(f"saved {model.save_state('vision_sft').result().path}")


if __name__ == "__main__":
    main()
