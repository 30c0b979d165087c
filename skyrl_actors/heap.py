"""Keep the garbage collector away from objects that stay.

A server's modules and tables are hundreds of thousands of objects. Each full collection would visit
all of them again: a quarter of the controller's CPU time (`python -m bench.scale`).
"""

import gc


def keep_present_objects() -> None:
    """Collect garbage once, and let later collections skip the objects that are there now.

    Call it when a process has started. References still free skipped objects. Skipped cycles are
    freed by the next call.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
