"""Proposers by name: where every verb gets its own, and the one place where a further method is entered.

A method of somebody else needs no entry: its name is `module:attribute`, where its `ProposerKind` stands
(docs/proposers.md).
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tercel.errors import TercelError

if TYPE_CHECKING:
    from tercel.decode.costs import StepCosts
    from tercel.decode.proposer import Proposer
    from tercel.draft import DraftModel
    from tercel.draft.shape import TreeShape
    from tercel.target_model.protocol import TargetModel

VANILLA, EAGLE3, SAMPLED_CHAIN = "vanilla", "eagle3", "eagle3-sampled-chain"
PLD, SUFFIX, LOOKAHEAD, SPS, ORACLE = "pld", "suffix", "lookahead", "sps", "oracle"
EAGLE, EAGLE2, HASS = "eagle", "eagle2", "hass"
MEDUSA, MEDUSA_TYPICAL, HYDRA = "medusa", "medusa-typical", "hydra"
MTP, P_EAGLE = "mtp", "p-eagle"

# where each kind stands: imported when it is needed, since names are asked for before torch is there
KINDS: dict[str, str] = {
    VANILLA: "tercel.decode.vanilla:KIND",
    EAGLE3: "tercel.decode.eagle3:KIND",
    SAMPLED_CHAIN: "tercel.decode.sampled_chain:KIND",
    PLD: "tercel.decode.pld:KIND",
    SUFFIX: "tercel.decode.suffix:KIND",
    LOOKAHEAD: "tercel.decode.lookahead:KIND",
    SPS: "tercel.decode.sps:KIND",
    EAGLE: "tercel.methods.eagle:STATIC",
    EAGLE2: "tercel.methods.eagle:DYNAMIC",
    HASS: "tercel.methods.eagle:HARMONISED",
    MEDUSA: "tercel.methods.medusa:KIND",
    MEDUSA_TYPICAL: "tercel.methods.medusa:TYPICAL",
    HYDRA: "tercel.methods.hydra:KIND",
    ORACLE: "tercel.decode.oracle:KIND",
    MTP: "tercel.methods.mtp.proposer:KIND",
    P_EAGLE: "tercel.methods.p_eagle.proposer:KIND",
}
OnPiece = Callable[[int, int], None]
_PARTS = {
    "head": "a draft head, and none is given",
    "model": "a second model, and none is given; name one with --draft-model (in Python, model=…)",
}


@dataclass(frozen=True)
class Parts:
    """What a proposer may be made of. target: the model that verifies; head: a draft head that fits it; model: a second
    model with its vocabulary; shape: how large the drafts shall be (None: as large as pays, which is found out step by
    step; then it proposes the most that may pay)."""

    target: TargetModel
    head: DraftModel | None = None
    model: TargetModel | None = None
    shape: TreeShape | None = None


@dataclass(frozen=True)
class ProposerKind:
    """How proposers of a kind are made. needs: the parts that `make` cannot do without; may: those that it takes where
    they are given. draws: whether drafts are drawn at random, so that sampled text has the target's distribution but is
    not the text of the same seed without drafts. lossy: whether drafts are verified by a rule that changes the text
    (`Proposer.lossy`), which every output then says. about: what drafts, in a few words.
    """

    make: Callable[[Parts], Proposer]
    needs: tuple[Literal["head", "model"], ...] = ()
    draws: bool = False
    lossy: bool = False
    about: str = ""
    may: tuple[Literal["head"], ...] = ()

    def takes_head(self, given: bool) -> bool:
        """Whether a head has to be opened for it, if one is `given` or if none is."""
        return "head" in self.needs or (given and "head" in self.may)


def check_known(name: str, also: tuple[str, ...] = ()) -> None:
    """Raises `TercelError` for a name that is no proposer's, nor one of `also`; `module:attribute` may be one."""
    known = (*also, *KINDS)
    if name not in known and ":" not in name:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}, and MODULE:ATTRIBUTE of your own"
        raise TercelError(f"there is no method {name}; {hint}")


def proposer_kind(name: str) -> ProposerKind:
    """The kind of that name. Raises `TercelError` if there is none, or what is named cannot be imported."""
    check_known(name)
    module, _, attribute = KINDS.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a module does when it is imported
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TercelError(
            f"the method {name} cannot be imported ({reason}); its module has to be installed or on PYTHONPATH"
        ) from error
    if not isinstance(found, ProposerKind):
        raise TercelError(f"{name} is no ProposerKind of tercel.decode.proposers but a {type(found).__name__}")
    return found


def make_proposer(
    name: str,
    target: TargetModel,
    *,
    head: DraftModel | None = None,
    model: TargetModel | None = None,
    shape: TreeShape | None = None,
    costs: StepCosts | None = None,
    slots: int = 1,
    progress: OnPiece = lambda done, total: None,
) -> Proposer:
    """The proposer of that name, of these parts; those that it has no use for it leaves aside.

    shape: how large its drafts are; left out, as large as pays (`cost_aware.py`). costs: of a step; left out, they are
    looked up or measured, for up to `slots` rows. progress: pieces of work that were measured, and at most to be.
    Raises `TercelError` as `proposer_kind`, and if a part that it needs is missing.
    """
    kind, parts = proposer_kind(name), Parts(target, head, model, shape)
    for need in kind.needs:
        if getattr(parts, need) is None:
            raise TercelError(f"the method {name} drafts with {_PARTS[need]}")
    proposer = kind.make(parts)
    return proposer if shape is not None else sized(proposer, target, costs, slots, progress)


def sized(
    proposer: Proposer,
    target: TargetModel,
    costs: StepCosts | None = None,
    slots: int = 1,
    progress: OnPiece = lambda done, total: None,
) -> Proposer:
    """The proposer, its drafts cut to what pays; itself, if it never drafts. The rest as in `make_proposer`."""
    from tercel.decode.calibrate import step_costs
    from tercel.decode.cost_aware import CostAware
    from tercel.decode.outcomes import Outcomes

    if proposer.max_nodes == 1:
        return proposer
    if costs is not None:
        return CostAware(proposer, costs)
    return CostAware(proposer, step_costs(target, proposer, slots, progress), Outcomes.of(target, proposer))
