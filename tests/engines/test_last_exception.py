"""The exception of vLLM's process, from the output that it shares with the engine actor."""

import os
from pathlib import Path

from skyrl_actors.engines.last_exception import last_exception, own_last_exception

CORE = "(EngineCore pid=7) ERROR 11-24 04:23:59 [core.py:1512] "
LOG = f"""/lib/import.py:3: ImportWarning: an import warning
{CORE}Traceback (most recent call last):
{CORE}  File "core.py", line 1503, in run_busy_loop
{CORE}    raise RuntimeError("first")
{CORE}torch.OutOfMemoryError: tried to allocate 2 GiB
(MainProcess pid=3) ERROR 11-24 04:23:59 [async_llm.py:906] EngineDeadError: see above
"""


def test_the_last_exception_of_the_process_is_found():
    assert last_exception(LOG) == "torch.OutOfMemoryError: tried to allocate 2 GiB"
    assert last_exception(LOG + f"{CORE}ValueError: later") == "ValueError: later"
    assert last_exception("ValueError: of another process") == ""


def test_only_a_file_is_read(tmp_path: Path):
    reading, writing = os.pipe()
    assert own_last_exception(reading) == ""
    os.close(reading)
    os.close(writing)
    with (tmp_path / "log").open("w") as file:
        file.write("x" * 100_000 + "\n" + LOG)
        file.flush()
        assert "OutOfMemoryError" in own_last_exception(file.fileno())
