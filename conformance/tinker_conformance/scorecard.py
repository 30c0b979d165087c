"""Run checks, and print what they found: a table, JSON, or a page."""

import html
import json
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal

from tinker_conformance.checks import TIERS, Check, Failed, Skipped
from tinker_conformance.reproducer import script_of
from tinker_conformance.server import Server

Result = Literal["pass", "FAIL", "skip", "ERROR"]
STYLE = """\
body { font: 15px/1.5 system-ui; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
td { vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #8884; }
.pass { color: #17803d; } .FAIL, .ERROR { color: #c02020; font-weight: 600; } .skip { color: #888; }
pre { overflow-x: auto; background: #8882; padding: .5rem; }
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The outcome of one check."""

    tier: str
    check: str
    title: str
    result: Result
    detail: str
    seconds: float
    reproducer: str = ""


@dataclass(frozen=True, kw_only=True)
class Scorecard:
    """All outcomes for one server."""

    base_url: str
    model: str
    sdk: str
    started: str
    rows: tuple[Row, ...]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.result in ("FAIL", "ERROR")]

    def counts(self, tier: str | None = None) -> Counter[str]:
        return Counter(row.result for row in self.rows if tier in (None, row.tier))

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def outcome(check: Check, server: Server, limit_s: float) -> Row:
    """Run one check. A check without an end counts as failed after `limit_s`."""
    found: list[tuple[Result, str]] = []

    def run() -> None:
        try:
            server.renew()
            measured = check.run(server)
            found.append(("pass", measured or ""))
        except Failed as failed:
            found.append(("FAIL", str(failed)))
        except Skipped as skipped:
            found.append(("skip", str(skipped)))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            found.append(("ERROR", f"{type(error).__name__}: {error} ({last.name})"[:600]))

    began = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    result, detail = found[0] if found else ("FAIL", f"no end within {limit_s:.0f} s")
    bad = result in ("FAIL", "ERROR")
    return Row(
        tier=check.tier,
        check=check.name,
        title=check.title,
        result=result,
        detail=detail,
        seconds=round(time.monotonic() - began, 2),
        reproducer=script_of(check, server) if bad else "",
    )


def lost(check: Check, ended_in: str) -> Row:
    """Return the row of a check that could not run."""
    return Row(
        tier=check.tier,
        check=check.name,
        title=check.title,
        result="skip",
        detail=f"the server ended in {ended_in}; --start-command starts it again",
        seconds=0.0,
    )


def measured(
    checks: Iterable[Check],
    server: Server,
    limit_s: float,
    sdk: str,
    report: Callable[[Row], None],
) -> Scorecard:
    """Run checks one after another, until the server ends and cannot be started again."""
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    rows: list[Row] = []
    ended_in = ""
    for one in sorted(checks, key=lambda one: TIERS.index(one.tier)):
        row = lost(one, ended_in) if ended_in else outcome(one, server, limit_s)
        if not ended_in and not server.answers():
            row = replace(row, result="FAIL", detail=f"the server ended. {row.detail}")
            ended_in = "" if server.start() else one.name
        rows.append(row)
        report(row)
    return Scorecard(
        base_url=server.base_url,
        model=server.base_model,
        sdk=sdk,
        started=started,
        rows=tuple(rows),
    )


def line_of(row: Row) -> str:
    detail = f"\n       {row.detail}" if row.detail else ""
    return f"{row.result:<5}  {row.tier:<10}  {row.title}  ({row.seconds:.1f} s){detail}"


def summary(card: Scorecard) -> str:
    """Return the counts of each tier, and a reproducer for each failed row."""
    lines = [f"{card.base_url}, {card.model}, tinker {card.sdk}, {card.started}", ""]
    lines.append(f"{'tier':<12}{'pass':>6}{'fail':>6}{'skip':>6}")
    for tier in [tier for tier in TIERS if card.counts(tier)]:
        counts = card.counts(tier)
        bad = counts["FAIL"] + counts["ERROR"]
        lines.append(f"{tier:<12}{counts['pass']:>6}{bad:>6}{counts['skip']:>6}")
    for row in card.failed:
        lines += ["", f"--- {row.check}: {row.title}", f"--- {row.detail}", row.reproducer]
    return "\n".join(lines)


def as_page(card: Scorecard) -> str:
    """Return the scorecard as one HTML page without scripts."""
    body = [f"<h1>Tinker conformance</h1><p>{html.escape(card.base_url)}, "]
    body.append(f"{html.escape(card.model)}, tinker {html.escape(card.sdk)}, {card.started}</p>")
    for tier in [tier for tier in TIERS if card.counts(tier)]:
        counts = card.counts(tier)
        shown = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
        body.append(f"<h2>{tier}</h2><p>{shown}</p><table>")
        for row in [row for row in card.rows if row.tier == tier]:
            more = f"<br>{html.escape(row.detail)}" if row.detail else ""
            if row.reproducer:
                more += f"<pre>{html.escape(row.reproducer)}</pre>"
            body.append(
                f"<tr><td class='{row.result}'>{row.result}</td>"
                f"<td>{html.escape(row.title)}{more}</td><td>{row.seconds:.1f} s</td></tr>"
            )
        body.append("</table>")
    title = "<title>Tinker conformance</title>"
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'>{title}"
    return f"<!doctype html><html><head>{head}<style>{STYLE}</style></head><body>{''.join(body)}"
