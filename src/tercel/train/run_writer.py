"""All that a run writes into its folder: journal, states, best and last head."""

from __future__ import annotations

import torch

from tercel.chat import dates
from tercel.draft import DraftModel
from tercel.draft.history import HeldOut
from tercel.files import require_room
from tercel.train.journal import Journal
from tercel.train.learner import Learner
from tercel.train.run_folder import RunFolder
from tercel.train.run_heads import RunHeads
from tercel.train.state import TrainState, load_state, save_state


def bytes_a_weight(*, averaged: bool, begun: bool = False) -> int:
    """What a run writes for a weight of its head, or still has to, once it has `begun`: a state has it, its mean where
    that is kept (`averaged`) and two moments in float32 and the best head's two bytes; heads have two bytes. While one
    is replaced it is there twice."""
    state = 14 + 4 * averaged
    return state + 2 if begun else 2 * (state + 2 + 2)


class RunWriter:
    """The one that writes into the folder of the run `key`, which this process holds (`RunFolder.held`).

    Of several ranks the first has it; the others go on from the same states and write nothing.
    """

    def __init__(self, folder: RunFolder, key: str) -> None:
        self.folder, self.key = folder, key
        self.journal = Journal(folder.metrics)
        self.heads = RunHeads(folder)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found damaged and made again, in sentences."""
        return (*self.heads.notes, *self.journal.notes)

    def found(self, weights: int, *, averaged: bool = False) -> TrainState | None:
        """The state that the run goes on from, if there is one. Raises `TercelError` as `load_state`, and if the disk
        has no room for what a run of a head of so many weights writes. averaged: whether it keeps their mean."""
        state = load_state(self.folder.training, self.key)
        require_room(self.folder.out, weights * bytes_a_weight(averaged=averaged, begun=state is not None))
        return state

    def begin(self, rendered_at: str | None) -> None:
        """Begin the journal with the moment that the chats were rendered for; what a run that saved nothing wrote
        goes."""
        self.journal.clear()
        self._note_moment(rendered_at)

    def go_on(self, state: TrainState, last: DraftModel) -> None:
        """Put journal and heads right as they were at `state`, whose head is `last`."""
        self.journal.cut(state.step)
        self._note_moment(last.info.training.rendered_at)
        self.heads.restore(state.best, state.best_head, last, state.step)

    def _note_moment(self, rendered_at: str | None) -> None:
        """Note when the chats were rendered for, unless that stands there."""
        if rendered_at is not None and self.journal.rendered_at() is None:
            self.journal.add({"step": 0, dates.RECORD: rendered_at})

    def add_step(self, step: int, metrics: dict[str, float]) -> None:
        self.journal.add({"step": step, **metrics})

    def is_evaluated(self, step: int) -> bool:
        return any(entry["step"] == step for entry in self.journal.evaluations())

    def stalled(self, patience: int) -> bool:
        """Whether so many evaluations in a row gave no better τ than the best before them (0: never)."""
        taus = [entry["eval"]["tau"] for entry in self.journal.evaluations()]
        return patience > 0 and len(taus) > patience and max(taus[-patience:]) <= max(taus[:-patience])

    def add_evaluation(self, step: int, held_out: HeldOut, model: DraftModel) -> None:
        """Note it, and keep `model` if it is the best so far."""
        self.heads.offer(model, held_out.tau)
        self.journal.add({"step": step, "eval": held_out.to_json()})

    def save(self, step: int, seconds: float, learner: Learner, last: DraftModel | None) -> None:
        """Write the state, and the head as it is now (`last`) where there is one to be kept."""
        self.journal.sync()
        save_state(
            TrainState(
                key=self.key,
                step=step,
                seconds=seconds,
                best=self.heads.best,
                head=learner.weights.master.state_dict(),
                optimizer=learner.optimizer.state_dict(),
                rng=torch.get_rng_state(),
                best_head=self.heads.best_files,
                mean=None if learner.weights.mean is None else learner.weights.mean.state_dict(),
            ),
            self.folder.training,
        )
        if last is not None:
            self.heads.write_last(last)
