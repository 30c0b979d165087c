"""A quick start with the real SDK that exits without closing its session.

Run `python -m tests.api.quick_start`.
"""

import os

import tinker
from tinker import types

from tests.api.local import MODEL


def main() -> None:
    client = tinker.ServiceClient()
    model = client.create_lora_training_client(MODEL, rank=8)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={  # type: ignore[dict-item]
            "target_tokens": [2, 3, 4],
            "weights": [1.0, 1.0, 1.0],
        },
    )
    trained = model.forward_backward([datum], "cross_entropy")
    stepped = model.optim_step(types.AdamParams(learning_rate=1e-3))
    assert trained.result().metrics["loss:sum"] == 3.0
    stepped.result()
    print("trained", flush=True)
    os._exit(0)  # no heartbeat and no request follows


if __name__ == "__main__":
    main()
