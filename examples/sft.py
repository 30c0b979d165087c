"""Supervised fine-tuning with the official tinker SDK.

Start a service first:

    skyrl-actors serve configs/cpu_tiny.yaml

    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
    python -m examples.sft
"""

import argparse

import tinker
from tinker import types

from examples.words import MODEL, Chat, accuracy, tensor, words


def datum(chat: Chat, text: str) -> types.Datum:
    """Return a training example. Only tokens of the answer have weight 1.

    Position i of the input predicts position i of the targets.
    """
    prompt, answer = chat.prompt(text), chat.answer(text)
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tensor(tokens[1:], "int64"), "weights": tensor(weights)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--base-model", default=MODEL, help="what the service was started with")
    options = parser.parse_args()
    held_out = words(100, seed=1)
    with tinker.ServiceClient() as service:
        model = service.create_lora_training_client(options.base_model, rank=32, seed=0).result()
        chat = Chat(model.get_tokenizer())
        before = accuracy(
            service.create_sampling_client(base_model=options.base_model).result(), chat, held_out
        )
        print(f"held-out accuracy before: {before:.2f}", flush=True)
        for step in range(options.steps):
            texts = [w for w in words(options.batch, seed=100 + step) if w not in held_out]
            data = [datum(chat, text) for text in texts]
            batch = model.forward_backward(data, "cross_entropy")
            rate = options.learning_rate * (1 - step / options.steps)
            model.optim_step(types.AdamParams(learning_rate=rate, eps=1e-8)).result()
            tokens = sum(sum(d.loss_fn_inputs["weights"].data) for d in data)
            if step % 5 == 4:
                print(
                    f"step {step + 1:3d}  loss {batch.result().metrics['loss:sum'] / tokens:.3f}",
                    flush=True,
                )
        after = accuracy(model.save_weights_and_get_sampling_client().result(), chat, held_out)
        print(f"held-out accuracy after:  {after:.2f}")
        print(f"saved {model.save_state('sft').result().path}")


if __name__ == "__main__":
    main()
