"""What a training run shows while it goes on."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from tercel.cli.consoles import PlainConsole, text_column
from tercel.errors import TercelError

if TYPE_CHECKING:
    from tercel.train.acceptance import Acceptance


class TrainProgress:
    """A `Watcher`: derived facts first, then a bar with rate, time left, loss, accuracy and the newest τ."""

    def __init__(self, console: PlainConsole, out: Path) -> None:
        self._console = console
        self._out = out
        columns = (
            text_column("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            text_column("{task.fields[shown]}"),
        )
        self._progress = Progress(*columns, console=console)
        self._task: TaskID | None = None
        self._steps = 0
        self._tokens, self._seconds, self._tau = 0.0, 0.0, ""
        self._can_draw = True

    def __enter__(self) -> TrainProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, step: int, steps: int, facts: dict[str, Any]) -> None:
        self._steps = steps
        for line in _lines(facts):
            self._print(line)
        if step == steps:
            self._print(f"the run in {self._out} has done all of its {steps} steps already")
        elif step:
            self._print(f"going on after step {step} of {steps}, where the run in {self._out} was stopped")
        self._task = self._progress.add_task("training", total=steps, completed=step, shown="")

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        assert self._task is not None
        self._tokens += metrics["tokens"]
        self._seconds += metrics["seconds"]
        rate = self._tokens / max(self._seconds, 1e-9)
        shown = f"{rate:,.0f} tokens/s  loss {metrics['loss']:.3f}  accuracy {metrics['accuracy']:.1%}{self._tau}"
        self._progress.update(self._task, completed=step, shown=shown)

    def evaluated(self, step: int, acceptance: Acceptance) -> None:
        self._tau = f"  τ {acceptance.tau:.3f}"
        first = acceptance.alpha[0] if acceptance.alpha else 0.0
        self._print(f"step {step} of {self._steps}: held-out τ {acceptance.tau:.3f}, 0-α {first:.3f}")
        self.draw_curves()

    def draw_curves(self) -> None:
        """Write the curves; without matplotlib say so once and go on."""
        from tercel.train.config import RunFolder
        from tercel.train.plot import plot_curves

        if not self._can_draw:
            return
        folder = RunFolder(self._out)
        try:
            plot_curves(folder.metrics, folder.curves)
        except TercelError as error:
            self._can_draw = False
            self._print(f"no curves: {error}")

    def _print(self, line: str) -> None:
        self._console.print_line(line)


def _lines(facts: dict[str, Any]) -> list[str]:
    """The derived facts of a run, one a line."""
    lines = [
        f"{facts['conversations']:,} rows to learn from, {facts['held_out_conversations']:,} held out",
        f"{facts['tokens']:,} tokens, {facts['supervised_tokens']:,} of them the assistant's",
        f"draft vocabulary: {facts['draft_vocabulary_coverage']:.2%} of the assistant's tokens are in it",
        f"{facts['steps']:,} steps, computed in {facts['dtype']}",
    ]
    if "embeddings" in facts:
        how = "learn too" if facts["embeddings"] == "trained" else "stay as they are, as its record says"
        lines.append(f"the head has embeddings of its own, which {how}")
    return lines
