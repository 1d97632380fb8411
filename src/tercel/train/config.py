"""Everything `tercel train` can be told; YAML keys and flags have these names."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_type_hints

from tercel import limits
from tercel.errors import TercelError
from tercel.reading import short
from tercel.target_model.backend_names import NONE, SHARDINGS

LossKind = Literal["soft", "hard", "lk"]  # what can be set
RowLoss = LossKind | Literal["masses"]
OptimizerKind = Literal["muon", "adamw"]
RECIPE, RUN = "Recipe", "Run"
TEXT, DRAFTS = "text", "drafts"  # what later steps read
RANDOM, LAST_LAYER = "random", "target"  # what the layer begins as
COSINE, LINEAR, HOLD = "cosine", "linear", "hold"  # how the rate falls
HELD = 0.8  # share of the steps behind the warm-up that `hold` holds it
EAGLE3, P_EAGLE = "eagle3", "p-eagle"

# How heads can learn, by the name in `TrainConfig.method`: where each `Lesson` stands, imported when it is needed, so
# that it may be in a later room. The one place where a further method of training is entered.
METHODS: dict[str, str] = {
    EAGLE3: "tercel.train.eagle3:Eagle3Lesson",
    "eagle": "tercel.methods.eagle:EagleLesson",
    "hass": "tercel.methods.eagle:HassLesson",
    "medusa": "tercel.methods.medusa:MedusaLesson",
    "hydra": "tercel.methods.hydra:HydraLesson",
    "mtp": "tercel.methods.mtp.lesson:MtpLesson",
    P_EAGLE: "tercel.methods.p_eagle.lesson:PEagleLesson",
}
PARTS = ("medusa", "hydra")  # those whose heads have a part for each step
FUSING = (EAGLE3, P_EAGLE)  # those whose heads read several layers; all others the last hidden state alone
# settings that not every method has a use for, with those that have
_SOME: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("feature_loss", "norm_output"), (EAGLE3,)),
    **dict.fromkeys(("feature_layers", "fc_norm"), FUSING),
    "tie_size": (P_EAGLE,),
    **dict.fromkeys(("dropout", "feature_noise", "mlp_width", "layer_start", "step_inputs", "head_layers"), (EAGLE3,)),
    "freeze_lm_head": (EAGLE3, *PARTS),
    **dict.fromkeys(("part_layers", "shared_output"), PARTS),
}


@dataclass(frozen=True)
class Setting:
    """A setting in a few words, for whoever gives it. flag: the heading among the flags of `tercel train`; None for one
    that is given in a file only. typed: one of a file that may be typed too, though no list of flags has it."""

    help: str
    flag: str | None = None
    typed: bool = False


@dataclass(frozen=True)
class Objective:
    """How the steps' losses are made and summed (spec section 5).

    steps `S`; decay `w` of `sum_s w^s loss_s` (`None`: the plain mean of the paper's formula); kind of loss
    (`losses.py`); oov: whether rows whose target argmax the head cannot propose are dropped; average over the rows of a
    sequence first, or over all rows at once.
    """

    steps: int = 7
    decay: float | None = 0.8
    kind: RowLoss = "soft"
    oov: str = "drop"
    average: str = "sequence"

    def step_weight(self, step: int) -> float:
        return 1.0 / self.steps if self.decay is None else self.decay**step

# Of what sizes something, or is multiplied with weights: the least and the most.
_RANGES = (
    ("epochs", 1, limits.PLANNED),
    ("max_steps", 0, limits.COUNT),
    ("batch_tokens", 1, limits.BATCH_TOKENS),
    ("accumulate", 1, limits.ACCUMULATE),
    ("weight_decay", 0, limits.RATE),
    ("prompt_weight", 0, 1),
    ("dropout", 0, 0.9),
    ("ema", 0, 0.9999),
    ("cycles", 1, limits.COUNT),
    ("mlp_width", 0, limits.HEAD_SIZE),
    ("head_layers", 1, limits.HEAD_LAYERS),
    ("feature_noise", 0, limits.RATE),
    ("max_length", 1, limits.POSITIONS),
    ("ttt_steps", 1, limits.TTT_STEPS),
    ("feature_loss", 0, limits.RATE),
    ("part_layers", 1, limits.PART_LAYERS),
    ("tie_size", 0, limits.TIE_SIZE),
    ("draft_vocab", 0, limits.VOCABULARY),
    ("eval_every", 1, limits.COUNT),
    ("patience", 0, limits.COUNT),
    ("save_every", 1, limits.COUNT),
)


# What could not be set once, and what it was then: a run that leaves it so has the key that it had.
_ADDED = {
    **{"optimizer": "adamw", "method": EAGLE3, "feature_loss": 0.0},
    **{"part_layers": 1, "shared_output": False, "tie_size": 128},
    **{"prompt_weight": 0.0, "dropout": 0.0, "feature_noise": 0.0, "ema": 0.0, "mlp_width": 0},
    **{"layer_start": RANDOM, "step_inputs": TEXT, "schedule": COSINE, "cycles": 1, "head_layers": 1},
}


@dataclass(frozen=True)
class _Start:
    """Peak rate and share of the warm-up of a run that is told neither."""

    lr: float
    warmup: float


_NEW, _AGAIN = _Start(5e-4, 0.04), _Start(2e-4, 0.1)


@dataclass(frozen=True)
class TrainConfig:
    """Recipe of one training run; defaults follow the paper where the scale allows it (spec section 7).

    method: a name of `METHODS`.
    max_steps: end there, schedule included, however many epochs there are (0: no limit).
    batch_tokens: packed tokens of one optimizer step's micro-batch; accumulate: micro-batches a step.
    lr: peak of a linear warm-up (share `warmup` of all steps) and a `schedule` down to `final_lr` of it. A rate that a
    new head needs makes one that has learned (`start_from`) forget, so both are gentler then if they are left out.
    ttt_steps: `S`; decay: weight of step `s` is `decay^s` (0: the plain mean of the paper's formula).
    loss: of the target's distribution (soft, lk) or the text's own tokens (hard); left out, what the method's paper
    has.
    feature_loss: of the paper's ablation.
    prompt_weight: the target's distribution is known at tokens that it did not write too. The draft vocabulary and what
    is held out are of answers alone all the same.
    part_layers, shared_output: of heads that have a part for each step, how deep each is, and whether all have one
    output layer.
    tie_size: of heads that draft all positions at once, the width of the state that ties them together.
    start_from: a head (folder, or name of a target with a shipped one) whose weights and draft vocabulary this run
    begins with, under a schedule of its own.
    step_inputs: what drafts say the text need not, and the target's distribution is that of the text all the same.
    head_layers: those behind the first read what it gives, and no embeddings.
    layer_start: matrices and norms of the target's last layer, where it has the parts of the head's first.
    freeze_lm_head: keep the target's output rows as they are, as in the paper's text (with draft_vocab 0: its whole
    output layer); otherwise they are only the start.
    draft_vocab: `W` (0: the target's whole vocabulary).
    """

    method: Annotated[str, Setting("How the head learns, and so of what kind it is.", typed=True)] = EAGLE3
    epochs: Annotated[int, Setting("Passes over the data.", RECIPE)] = 2
    max_steps: Annotated[int, Setting("End after so many optimizer steps; 0 is all epochs.", RECIPE)] = 0
    batch_tokens: Annotated[int, Setting("Packed tokens of a micro-batch.", RECIPE)] = 2048
    accumulate: Annotated[int, Setting("Micro-batches of an optimizer step.")] = 1
    lr: Annotated[
        float | None, Setting("Peak learning rate; left out, 5e-4, and 2e-4 with start-from.", RECIPE)
    ] = None
    final_lr: Annotated[float, Setting("Share of the peak rate that it falls to.")] = 0.05
    schedule: Annotated[
        str, Setting("cosine or linear, or hold: at its peak, and linear over the last fifth.")
    ] = COSINE
    cycles: Annotated[int, Setting("How often the rate falls, each time from its peak.")] = 1
    warmup: Annotated[
        float | None, Setting("Share of the steps spent warming up; left out, 0.04, and 0.1 with start-from.")
    ] = None
    optimizer: Annotated[str, Setting("adamw, or muon for matrices with AdamW for the rest.")] = "adamw"
    weight_decay: Annotated[float, Setting("Weight decay.")] = 0.0
    dropout: Annotated[
        float, Setting("Share of what fc, attention and MLP give that is dropped at random while the head learns.")
    ] = 0.0
    feature_noise: Annotated[
        float, Setting("Features are moved at random while the head learns, by at most so much of their size.")
    ] = 0.0
    ema: Annotated[
        float, Setting("Decay of a running mean of the weights, which is then evaluated and saved; 0 is none.")
    ] = 0.0
    clip: Annotated[float, Setting("Largest norm of the gradient.")] = 0.5
    max_length: Annotated[int, Setting("Cut longer conversations, in tokens.")] = 2048
    ttt_steps: Annotated[int, Setting("Steps of the training-time test.")] = 7
    decay: Annotated[float, Setting("Step s weighs decay^s; 0 is the plain mean.")] = 0.8
    loss: Annotated[
        str | None, Setting("soft, hard or lk; left out, soft, and hard where the method is medusa or hydra.")
    ] = None
    feature_loss: Annotated[
        float, Setting("Weight of the distance from the target's last hidden state beside the loss; EAGLE-3 has none.")
    ] = 0.0
    oov: Annotated[str, Setting("drop or keep rows outside the draft vocabulary.")] = "drop"
    step_inputs: Annotated[
        str, Setting("What later steps read: text, its tokens; drafts, what the head itself said before.")
    ] = TEXT
    average: Annotated[str, Setting("Mean over sequence or token.")] = "sequence"
    prompt_weight: Annotated[
        float, Setting("How much prompts' tokens count beside answers' in what is learned; 0 is not at all.")
    ] = 0.0
    draft_vocab: Annotated[int, Setting("Tokens the head can draft; 0 is all.", RECIPE)] = 8192
    feature_layers: Annotated[
        tuple[int, ...],
        Setting("Layers whose inputs are the features, such as 2,15,27; none is a low, a middle and a high one."),
    ] = ()
    mlp_width: Annotated[int, Setting("Width of the head's MLP; 0 is the target's.")] = 0
    head_layers: Annotated[int, Setting("Decoder layers of the head; most engines take one only.")] = 1
    layer_start: Annotated[
        str, Setting("What the head's layer begins as: random, or target for the target's last layer.")
    ] = RANDOM
    freeze_lm_head: Annotated[bool, Setting("Keep the target's output layer (paper's text).")] = False
    fc_norm: Annotated[bool, Setting("Norm each feature first (EAGLE-3.1).")] = False
    norm_output: Annotated[bool, Setting("Feed back the normed hidden (EAGLE-3.1).")] = False
    part_layers: Annotated[int, Setting("Layers of each part (medusa, hydra; 4 in Hydra++).")] = 1
    shared_output: Annotated[bool, Setting("One output layer for all parts (medusa, hydra).")] = False
    tie_size: Annotated[
        int, Setting("Width of the state that ties a draft's positions together (p-eagle); 0 is none, as published.")
    ] = 128
    start_from: Annotated[str, Setting("Begin with the weights of this head.", RUN)] = ""
    seed: Annotated[int, Setting("Of initialisation and data order.")] = 0
    eval_share: Annotated[float, Setting("Share of the conversations held out.")] = 0.02
    eval_every: Annotated[int, Setting("Steps between evaluations.")] = 100
    patience: Annotated[int, Setting("End after so many evaluations without a better τ; 0 is never.")] = 0
    save_every: Annotated[int, Setting("Steps between saved states.")] = 100
    target_sharding: Annotated[
        str, Setting("none, fsdp or tensor: how several processes share the target.")
    ] = NONE

    @classmethod
    def told(cls) -> dict[str, Setting]:
        """All settings by name, in words."""
        return {name: get_args(hint)[1] for name, hint in get_type_hints(cls, include_extras=True).items()}

    def __post_init__(self) -> None:
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if not value >= least:  # NaN neither
                raise TercelError(f"{name} must be at least {least}, not {short(value)}")
            if value > most:
                raise TercelError(f"{name} must be at most {most:,}, not {short(value)}")
        for name, value, allowed in (
            ("method", self.method, tuple(METHODS)),
            ("loss", self.loss_kind, get_args(LossKind)),
            ("optimizer", self.optimizer, get_args(OptimizerKind)),
            ("oov", self.oov, ("drop", "keep")),
            ("average", self.average, ("sequence", "token")),
            ("schedule", self.schedule, (COSINE, LINEAR, HOLD)),
            ("step_inputs", self.step_inputs, (TEXT, DRAFTS)),
            ("layer_start", self.layer_start, (RANDOM, LAST_LAYER)),
            ("target_sharding", self.target_sharding, SHARDINGS),
        ):
            if value not in allowed:
                raise TercelError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        for setting in fields(self):
            users = _SOME.get(setting.name, (self.method,))
            if self.method not in users and getattr(self, setting.name) != setting.default:
                raise TercelError(
                    f"{setting.name} is a setting of {' and '.join(users)}; leave it out with the method {self.method}"
                )
        if self.layer_start != RANDOM and (self.start_from or self.target_sharding != NONE):
            other = "start_from" if self.start_from else "target_sharding"
            why = "has a layer already" if self.start_from else "keeps no layer whole"
            raise TercelError(f"layer_start does not go with {other}, which {why}; leave one of them out")
        if not 0 < self.eval_share < 1:
            raise TercelError(f"eval_share must lie between 0 and 1, not {self.eval_share}")
        for name, rate, most in (("lr", self.peak_lr, limits.RATE), ("clip", self.clip, limits.LOGIT)):
            if not 0 < rate <= most:
                raise TercelError(f"{name} must be positive and at most {most:g}, not {rate}")
        if not 0 <= self.seed < 2**40:  # an epoch's order takes a million times the seed, in 64 bits
            raise TercelError(f"seed must lie between 0 and 2**40 - 1, not {short(self.seed)}")
        for name, share in (("final_lr", self.final_lr), ("warmup", self.warmup_share), ("decay", self.decay)):
            if not 0 <= share <= 1:
                raise TercelError(f"{name} must lie between 0 and 1, not {share}")

    @property
    def objective(self) -> Objective:
        return Objective(
            steps=self.ttt_steps,
            decay=self.decay or None,
            kind=self.loss_kind,  # type: ignore[arg-type]  # checked above
            oov=self.oov,
            average=self.average,
        )

    @property
    def loss_kind(self) -> str:
        return ("hard" if self.method in PARTS else "soft") if self.loss is None else self.loss

    @property
    def peak_lr(self) -> float:
        return (_AGAIN if self.start_from else _NEW).lr if self.lr is None else self.lr

    @property
    def warmup_share(self) -> float:
        return (_AGAIN if self.start_from else _NEW).warmup if self.warmup is None else self.warmup

    def values(self) -> dict[str, Any]:
        """All settings by name, those that were left out as they are meant."""
        return {**asdict(self), "lr": self.peak_lr, "warmup": self.warmup_share, "loss": self.loss_kind}

    def learning_rate(self, step: int, steps: int) -> float:
        """For optimizer step `step` (from 0) of `steps`: linear warm-up, then the schedule, as often as it is asked."""
        warmup = max(1, int(self.warmup_share * steps))
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        progress = self.cycles * (step - warmup) / max(1, steps - warmup) % 1.0
        falling = {
            COSINE: 0.5 * (1 + math.cos(math.pi * progress)),
            LINEAR: 1 - progress,
            HOLD: min(1.0, (1 - progress) / (1 - HELD)),
        }
        return self.peak_lr * (self.final_lr + (1 - self.final_lr) * falling[self.schedule])

    def digest(self, data: str, target: str) -> str:
        """Key of a run: what a resumed run must share with the one it continues."""
        values = {**self.values(), "data": data, "target": target}
        if self.start_from:
            values["settled"] = True  # earlier versions began at once
        values["best_by"] = "walk"  # runs of earlier versions chose their best head by another, higher τ
        # they change what is written, or who computes, and not what is learned
        for free in ("eval_every", "patience", "save_every", "target_sharding"):
            values.pop(free)
        for added, once in _ADDED.items():
            if values[added] == once:
                values.pop(added)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
