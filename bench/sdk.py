"""The overhead of a small forward_backward: SDK, HTTP, Serve, controller and Ray."""

import statistics
import time

import tinker
from tinker import types

from bench.harness import emit, service

CALLS, TOKENS = 150, 32


def main() -> None:
    row = types.Datum(
        model_input=types.ModelInput.from_ints([1] * TOKENS),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[2] * TOKENS, dtype="int64", shape=[TOKENS])
        },
    )
    added, total, steps = [], [], []
    with service("base_model.warmup_steps=0"), tinker.ServiceClient() as client:
        model = client.create_lora_training_client("skyrl-actors/tiny", rank=8).result()
        for i in range(CALLS + 20):
            started = time.perf_counter()
            output = model.forward_backward([row], "cross_entropy").result()
            took = time.perf_counter() - started
            if i >= 20:
                total.append(1e3 * took)
                added.append(1e3 * (took - output.metrics["compute_s:sum"]))
        for _ in range(50):
            started = time.perf_counter()
            model.optim_step(types.AdamParams()).result()
            steps.append(1e3 * (time.perf_counter() - started))
    cuts = statistics.quantiles(added, n=100)
    emit(
        "sdk",
        {
            "added_ms_p50": round(cuts[49], 2),
            "added_ms_p95": round(cuts[94], 2),
            "total_ms_p50": round(statistics.median(total), 2),
            "optim_step_ms_p50": round(statistics.median(steps), 2),
            "calls": CALLS,
            "tokens": TOKENS,
        },
    )


if __name__ == "__main__":
    main()
