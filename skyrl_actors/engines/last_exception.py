"""Why vLLM's own process ended.

vLLM computes in a process below the engine actor. When it fails, the actor only learns that it
ended. The exception is in the output that both processes share.
"""

import os
import re
import stat

LAST_BYTES = 65_536
# What vLLM puts before each line of a traceback, for example
# "(EngineCore pid=7) ERROR 11-24 04:23:59 [core.py:1512] ".
PREFIX = re.compile(r"^\(EngineCore[^)]*\) ERROR \S+ \S+ \[[^\]]+\] ")
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b")


def last_exception(text: str) -> str:
    """Return the last exception in the log of vLLM's process, for example "RuntimeError: …"."""
    logged = (line[found.end() :] for line in text.splitlines() if (found := PREFIX.match(line)))
    exceptions = [line for line in logged if EXCEPTION.match(line)]
    return exceptions[-1] if exceptions else ""


def own_last_exception(descriptor: int = 1) -> str:
    """Return the last exception in this process's output; "" if the output is not a file."""
    path = f"/proc/self/fd/{descriptor}"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ""
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
            return last_exception(file.read().decode(errors="replace"))
    except OSError:
        return ""
