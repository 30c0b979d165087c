"""Test a Tinker server.

tinker-conformance --base-url http://127.0.0.1:8000 [--api-key KEY] [--tier numbers ...]
"""

import argparse
import os
import sys
import threading
from importlib.metadata import version
from pathlib import Path

from tinker_conformance import (
    core,
    durability,
    hostile,
    images,
    load,
    models,
    numbers,
    sampling,
    scorecard,
)
from tinker_conformance.checks import CHECKS, TIERS, Check
from tinker_conformance.server import Server

MODULES = (
    core,
    numbers,
    sampling,
    models,
    images,
    load,
    durability,
    hostile,
)  # importing them fills CHECKS


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tinker-conformance", description=(__doc__ or "").strip())
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL"), help="the server")
    parser.add_argument(
        "--api-key", default=os.environ.get("TINKER_API_KEY", "tml-conformance"), help="its key"
    )
    parser.add_argument("--model", help="base model; by default the first one that it lists")
    parser.add_argument("--tier", action="append", choices=TIERS, help="by default all; repeatable")
    parser.add_argument("--check", action="append", help="name of a check; repeatable")
    parser.add_argument("--list", action="store_true", help="list the checks and end")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.02,
        help="relative difference that is allowed; 0.1 for servers that compute in bfloat16",
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one answer")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one check")
    parser.add_argument("--kill-command", help="kills the server; for checks of durability")
    parser.add_argument("--start-command", help="starts a server that a check ended")
    parser.add_argument("--second-api-key", help="of another tenant; for fairness between keys")
    parser.add_argument(
        "--latency",
        type=float,
        metavar="SECONDS",
        help="fail if a call waits longer beside its computation; by default it is only measured",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scorecard as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the scorecard as a page")
    return parser.parse_args(given)


def chosen(tiers: list[str] | None, names: list[str] | None) -> list[Check]:
    """Return the checks of these tiers and names. Raises ValueError for an unknown name."""
    if unknown := set(names or ()) - {each.name for each in CHECKS}:
        raise ValueError(f"no check is called {', '.join(sorted(unknown))}; --list shows all")
    return [
        each
        for each in CHECKS
        if (not tiers or each.tier in tiers) and (not names or each.name in names)
    ]


def _fault(asked: argparse.Namespace, checks: list[Check]) -> str | None:
    """Return what is wrong with the arguments, before anything is sent."""
    if not asked.base_url:
        return "use --base-url, or set TINKER_BASE_URL"
    if not checks:
        return "no check of these names is in these tiers; --list shows all"
    for file in (asked.json, asked.html):
        if file is not None and not file.absolute().parent.is_dir():
            return f"{file.absolute().parent} is no folder"
    return None


def _connected(asked: argparse.Namespace) -> Server:
    """Connect within --limit. The SDK itself tries for minutes."""
    found: list[Server | Exception] = []

    def connect() -> None:
        try:
            found.append(
                Server(
                    asked.base_url,
                    asked.api_key,
                    asked.model,
                    asked.tolerance,
                    asked.timeout,
                    asked.kill_command,
                    asked.start_command,
                    asked.second_api_key,
                    asked.latency,
                )
            )
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(asked.limit)
    if not found:
        raise TimeoutError(f"no session and no list of models within {asked.limit:.0f} s")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def main(given: list[str] | None = None) -> int:
    """Return 0 if no check failed, 1 if one did, and 2 if the server cannot be tested."""
    asked = arguments(given)
    try:
        checks = chosen(asked.tier, asked.check)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if asked.list:
        print("\n".join(f"{each.tier:<10}  {each.name:<28}  {each.title}" for each in checks))
        return 0
    if fault := _fault(asked, checks):
        print(f"error: {fault}", file=sys.stderr)
        return 2
    try:
        server = _connected(asked)
    except Exception as error:
        print(f"error: {asked.base_url} cannot be tested: {error}", file=sys.stderr)
        return 2
    card = scorecard.measured(
        checks,
        server,
        asked.limit,
        version("tinker"),
        lambda row: print(scorecard.line_of(row), flush=True),
    )
    server.close()
    print("\n" + scorecard.summary(card))
    if asked.json:
        asked.json.write_text(card.as_json())
    if asked.html:
        asked.html.write_text(scorecard.as_page(card))
    return 1 if card.failed else 0


if __name__ == "__main__":
    sys.exit(main())
