"""What a training run shows while it goes on."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from tercel.cli.consoles import PlainConsole, text_column
from tercel.errors import TercelError

if TYPE_CHECKING:
    from tercel.draft.history import HeldOut, TrainingRecord


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

    def started(self, step: int, steps: int, record: TrainingRecord) -> None:
        self._steps = steps
        for line in _lines(record):
            self._print(line)
        if step == steps:
            self._print(f"the run in {self._out} has done all of its {steps} steps already")
        elif step:
            self._print(f"resuming after step {step} of {steps}, where the run in {self._out} stopped")
        self._task = self._progress.add_task("training", total=steps, completed=step, shown="")

    def warned(self, sentence: str) -> None:
        self._print(f"warning: {sentence}")

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        assert self._task is not None
        self._tokens += metrics["tokens"]
        self._seconds += metrics["seconds"]
        rate = self._tokens / max(self._seconds, 1e-9)
        shown = f"{rate:,.0f} tokens/s  loss {metrics['loss']:.3f}  accuracy {metrics['accuracy']:.1%}{self._tau}"
        self._progress.update(self._task, completed=step, shown=shown)

    def evaluated(self, step: int, held_out: HeldOut) -> None:
        self._tau = f"  τ {held_out.tau:.3f}"
        first = held_out.alpha[0] if held_out.alpha else 0.0
        self._print(f"step {step} of {self._steps}: held-out τ {held_out.tau:.3f}, 0-α {first:.3f}")
        self.draw_curves()

    def draw_curves(self) -> None:
        """Write the curves; without matplotlib say so once and go on."""
        from tercel.train.plot import plot_curves
        from tercel.train.run_folder import RunFolder

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


def _lines(record: TrainingRecord) -> list[str]:
    """What is known of a run when it begins, one fact a line."""
    assert record.recipe is not None
    lines = [
        f"{record.conversations:,} conversations to learn from, {record.held_out_conversations:,} held out",
        f"{record.tokens:,} tokens, {record.supervised_tokens:,} of them the assistant's",
        f"draft vocabulary: {record.draft_vocabulary_coverage:.2%} of the assistant's tokens are in it",
        f"{record.steps:,} steps up to a learning rate of {record.recipe.lr:g}, computed in {record.dtype}",
    ]
    if record.embeddings is not None:
        how = "learn too" if record.embeddings == "trained" else "stay as they are, as its record says"
        lines.append(f"the head has embeddings of its own, which {how}")
    return lines
