"""`runs` and `report`: show training runs from the contents of their folders."""

import json
from pathlib import Path

from skyrl_actors.commands.terminal import note, show_rows
from skyrl_actors.jobs.report import write_page
from skyrl_actors.observe.runs import listed


def show(folder: Path, as_json: bool) -> None:
    """Print a summary of each run in a folder, as a table or as JSON."""
    rows = listed(folder)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    show_rows(f"runs in {folder}", rows)


def report(run: Path) -> None:
    """Write the report of a run into its folder, as HTML and PNG."""
    page = write_page(run).resolve()
    note(f"wrote {page} and {page.with_suffix('.png').name} in the same folder")
