"""Keep the garbage collector away from objects that stay.

A server's modules and tables are hundreds of thousands of objects. Each full collection would visit
all of them again: a quarter of the controller's CPU time (`python -m bench.scale`). Open requests
are as many again: with 20,000 of them, full collections took a fifth of the CPU time, and the
longest stopped the process for 1.5 s (`python -m bench.scale_cluster --hours 0.1 --unit 64`).
"""

import gc

# Collections of the middle generation between full ones, 10 by default. What only a full one finds
# is rare: reference counts free requests and answers.
BETWEEN_FULL = 1000


def keep_present_objects() -> None:
    """Collect garbage once, and let later collections skip the objects that are there now.

    Later full collections are rare. Call it when a process has started. References still free
    skipped objects. Skipped cycles are freed by the next call.
    """
    gc.set_threshold(*gc.get_threshold()[:2], BETWEEN_FULL)
    gc.unfreeze()
    gc.collect()
    gc.freeze()
