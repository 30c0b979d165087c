"""What a person sees: notes on what starts and why it waits, progress bars, one line an iteration, a closing table."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from skyrl_actors.jobs.ppo import Outcome
from skyrl_actors.jobs.rollouts import Rollout
from skyrl_actors.jobs.trackers import RunFolder

console = Console(highlight=False, soft_wrap=True, emoji=False)  # ids hold ":train:", which is an emoji's name
if not console.is_terminal:
    console = Console(highlight=False, soft_wrap=True, emoji=False, width=160)
HEADER_EVERY = 10
COLUMNS = (
    ("iter", 4, "step", "d"),
    ("reward", 6, "reward", ".3f"),
    ("accuracy", 8, "eval/accuracy", ".3f"),
    ("KL", 6, "kl", ".4f"),
    ("v-loss", 7, "value_loss", ".4f"),
    ("expl.var", 8, "explained_variance", ".2f"),
    ("clip", 5, "clip_fraction", ".3f"),
    ("mismatch", 8, "logprob_mismatch", ".1e"),
    ("tok/s smp", 9, "sample_tokens_per_s", ".0f"),
    ("tok/s trn", 9, "train_tokens_per_s", ".0f"),
    ("sample s", 8, "seconds/sample", ".2f"),
    ("score s", 7, "seconds/values_and_reference", ".2f"),
    ("adv s", 5, "seconds/advantages", ".2f"),
    ("update s", 8, "seconds/update", ".2f"),
    ("transfer s", 10, "seconds/transfer", ".3f"),
)


def note(text: str) -> None:
    console.print(f"[dim]·[/dim] {text}")


def show_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """A table with the keys of the first row as its columns."""
    if not rows:
        console.print(f"{title}: none")
        return
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row.values()))
    console.print(table)


@contextmanager
def bar(label: str, total: int) -> Iterator[Progress]:
    """A progress bar that vanishes at the end; in a log file nothing is drawn."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(label, total=total, note="")
        yield progress


class RunView:
    """Tells the terminal and the run's folder how PPO goes."""

    def __init__(self, folder: RunFolder, progress: Progress):
        self.folder = folder
        self.progress = progress
        self._lines = 0

    def iteration(self, step: int, metrics: dict[str, float]) -> None:
        self.folder.log(step, metrics)
        row = {"step": step, **metrics}
        if self._lines % HEADER_EVERY == 0:
            self.progress.console.print("[bold]" + " ".join(f"{title:>{width}}" for title, width, _, _ in COLUMNS) + "[/bold]")
        self._lines += 1
        cells = [f"{row[key]:>{width}{form}}" if key in row else " " * (width - 1) + "-" for _, width, key, form in COLUMNS]
        self.progress.console.print(" ".join(cells))
        self.progress.update(self.progress.task_ids[0], completed=step, note=f"reward {metrics['reward']:.2f}")

    def warned(self, text: str) -> None:
        self.progress.console.print(f"[yellow]{text}[/yellow]")

    def evaluated(self, step: int, accuracy: float, rollouts: Sequence[Rollout]) -> None:
        if step == 0:
            self.progress.console.print(f"held-out greedy accuracy before PPO: [bold]{accuracy:.3f}[/bold]")
            self.folder.log(0, {"eval/accuracy": accuracy})
        name = "samples_before.txt" if step == 0 else "samples_after.txt"
        self.folder.samples(name, [(r.task.question, r.task.answer, r.text, r.reward) for r in rollouts])


def closing_table(outcome: Outcome, seconds: float, peak_rss_gib: float, folder: RunFolder) -> None:
    table = Table(title="held-out greedy accuracy", title_justify="left")
    for column in ("before PPO", "after PPO", "iterations", "seconds", "peak memory (GiB)"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{outcome.accuracy_before:.3f}", f"[bold green]{outcome.accuracy_after:.3f}[/bold green]",
        str(outcome.iterations), f"{seconds:.0f}", f"{peak_rss_gib:.1f}",
    )  # fmt: skip
    console.print(table)
    console.print(
        f"everything of this run: {folder.path.resolve()}/  (report.png, metrics.jsonl, samples, tensorboard, checkpoint)"
    )
