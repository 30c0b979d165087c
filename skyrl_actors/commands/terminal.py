"""Output in the terminal: notes, progress bars, one line for each iteration, a closing table."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from skyrl_actors.jobs.metrics import REGISTRY
from skyrl_actors.jobs.recorder import Recorder, ShownSample
from skyrl_actors.jobs.rollout import Rollout
from skyrl_actors.jobs.watcher import RunOutcome

# ids contain ":train:", which is the name of an emoji
console = Console(highlight=False, soft_wrap=True, emoji=False)
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
SUPERVISED = (
    ("step", 5, "step", "d"),
    ("nll", 7, "nll", ".4f"),
    ("loss", 7, "loss", ".4f"),
    ("pairs", 6, "pair_accuracy", ".3f"),
    ("margin", 8, "margin", ".3f"),
    ("held-out nll", 12, "eval/nll", ".4f"),
    ("held-out loss", 13, "eval/loss", ".4f"),
    ("held-out pairs", 14, "eval/pair_accuracy", ".3f"),
    ("grad", 7, "policy_grad_norm", ".3f"),
    ("grad", 7, "critic_grad_norm", ".3f"),
    ("rate", 8, "learning_rate", ".1e"),
    ("s", 6, "seconds/iteration", ".2f"),
)
ALWAYS = ("step", "eval/accuracy")


def note(text: str) -> None:
    """Print one line on the progress of a command. The text can contain Rich markup."""
    console.print(f"[dim]·[/dim] {text}")


def show_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table whose columns are the keys of the first row."""
    if not rows:
        console.print(f"{title}: none")
        return
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else plain(cell) for cell in row.values()))
    console.print(table)


def plain(cell: object) -> Text:
    """Return a cell as it is, because clients choose some: no markup and no control characters."""
    return Text("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in str(cell)))


@contextmanager
def bar(label: str, total: int | None) -> Generator[Progress]:
    """Show a progress bar, which is removed at the end. In a log file, nothing is drawn."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        progress.add_task(label, total=total, note="")
        yield progress


class RunView:
    """Print the progress of a job, and record it in the run's folder.

    The columns are those for which the first step has numbers.
    """

    def __init__(self, folder: Recorder, progress: Progress):
        self.folder = folder
        self.progress = progress
        self._lines = 0
        self._columns: tuple[tuple[str, int, str, str], ...] = ()
        self._evaluated: set[str] = set()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._recorded(lambda: self.folder.log(step, metrics))
        row = {"step": step, **metrics}
        if self._lines % HEADER_EVERY == 0:
            known = {*row, *self._evaluated, *ALWAYS}
            # present from the second iteration on
            known |= {"value_loss", "clip_fraction"} if "explained_variance" in row else set()
            self._columns = tuple(
                c for c in (COLUMNS if "reward" in row else SUPERVISED) if c[2] in known
            )
            titles = " ".join(f"{title:>{width}}" for title, width, _, _ in self._columns)
            self.progress.console.print(f"[bold]{titles}[/bold]")
        self._lines += 1
        cells = [
            f"{row[key]:>{width}{form}}" if key in row else " " * (width - 1) + "-"
            for _, width, key, form in self._columns
        ]
        self.progress.console.print(" ".join(cells))
        summary = next(
            (f"{key} {metrics[key]:.2f}" for key in ("reward", "nll", "loss") if key in metrics), ""
        )
        self.progress.update(self.progress.task_ids[0], completed=step, note=summary)

    def warned(self, text: str) -> None:
        self.progress.console.print(f"[yellow]{escape(text)}[/yellow]")

    def evaluated(
        self, step: int, metrics: dict[str, float], rollouts: Sequence[Rollout] = ()
    ) -> None:
        self._evaluated |= metrics.keys()
        if step == 0:
            for name, value in metrics.items():
                self.progress.console.print(
                    f"before training: {name} [bold]{value:.3f}[/bold] "
                    f"({REGISTRY[name].definition})"
                )
            self._recorded(lambda: self.folder.log(0, metrics))
        if rollouts:
            samples = [
                ShownSample(
                    question=rollout.task.question,
                    expected=rollout.task.answer,
                    answer=rollout.text,
                    reward=rollout.reward,
                    versions=tuple(piece.version for piece in rollout.pieces),
                    images=tuple(picture.content for picture in rollout.pictures),
                )
                for rollout in rollouts
            ]
            self._recorded(lambda: self.folder.samples(step, samples))

    def _recorded(self, write: Callable[[], None]) -> None:
        """Call `write`. A failure, for example a full disk, is printed, and the run continues."""
        try:
            write()
        except OSError as error:
            self.warned(f"not recorded: {error}")


def closing_table(
    outcome: RunOutcome, seconds: float, peak_rss_gib: float, folder: Recorder
) -> None:
    """Print the metric before and after the run, the resources used, and the run's folder."""
    table = Table(
        title=f"{outcome.metric}: {REGISTRY[outcome.metric].definition}", title_justify="left"
    )
    for column in ("before", "after", "steps", "seconds", "peak memory (GiB)"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{outcome.before:.3f}",
        f"[bold green]{outcome.after:.3f}[/bold green]",
        str(outcome.steps),
        f"{seconds:.0f}",
        f"{peak_rss_gib:.1f}",
    )
    console.print(table)
    console.print(
        f"files of this run: {folder.path.resolve()}/  (report.html, metrics.jsonl, samples, "
        "tensorboard, checkpoint)"
    )
