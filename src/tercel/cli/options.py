"""Options that several verbs share, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from tercel import limits
from tercel.cli.paths import user_name, user_names, user_path
from tercel.decode.proposers import EAGLE3, VANILLA, check_known, proposer_kind
from tercel.errors import TercelError
from tercel.target_model.backend_names import AUTO, OPENVINO, TORCH

if TYPE_CHECKING:
    from tercel.decode.generation_config import Asked

_MODEL, _SAMPLING, _DRAFT = "Model", "Sampling", "Draft"

TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        parser=user_name,
        help="A model's folder, a GGUF file, a built-in name, or owner/name of the Hub.",
    ),
]
HeadName = Annotated[
    str | None,
    typer.Argument(
        metavar="[HEAD]",
        parser=user_name,
        help="A draft head: its folder, or owner/name of the Hub; left out, the one shipped for TARGET.",
        show_default=False,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        parser=user_path,
        help="Write the result there as JSON; - means standard output, and all else then goes to standard error.",
        show_default=False,
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE.png|svg", parser=user_path, help="Draw the result there.", show_default=False),
]
TaskList = Annotated[
    str,
    typer.Option(metavar="NAME_OR_FILE[:N],…", parser=user_names, help="Tasks, each with all or N of its questions."),
]
DataDirs = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR", parser=user_path, help="Where tasks are looked for; may be repeated.", show_default=False
    ),
]
OnlyHead = Annotated[
    str,
    typer.Argument(
        metavar="HEAD",
        parser=user_name,
        help="A head's folder, owner/name of the Hub, or a target with a shipped head.",
    ),
]


TemplateArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--template-arg",
        metavar="NAME=VALUE",
        help="Give the chat template a value, such as enable_thinking=false; may be repeated.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]


class LayerIds(StrEnum):
    auto = "auto"
    input = "input"
    output = "output"

    @property
    def meaning(self) -> Literal["auto", "input", "output"]:
        return cast('Literal["auto", "input", "output"]', self.value)


LayerIdsOption = Annotated[
    LayerIds,
    typer.Option(help="What layer ids mean in files of other trainers; auto asks the files.", rich_help_panel=_DRAFT),
]


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Backend(StrEnum):
    auto = AUTO
    torch = TORCH
    openvino = OPENVINO


# what `--draft` says beside names of proposers, and whose it is
SHAPES = {"tree": EAGLE3, "chain": EAGLE3, "none": VANILLA}


@dataclass(frozen=True)
class ModelOptions:
    """How the target is loaded."""

    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Data type the models compute in.",
            show_default="bfloat16 where the machine supports it",
            rich_help_panel=_MODEL,
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(help="cpu, cuda, cuda:1, mps; auto takes cuda if there is one.", rich_help_panel=_MODEL),
    ] = "auto"
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that comes with the model.", rich_help_panel=_MODEL),
    ] = False
    accept_licence: Annotated[
        bool,
        typer.Option(
            "--accept-licence",
            help="Accept the licence of a built-in target that asks for it.",
            rich_help_panel=_MODEL,
        ),
    ] = False
    template_arg: TemplateArgs = None


@dataclass(frozen=True)
class DecodingModelOptions(ModelOptions):
    """How the target is loaded to decode with it."""

    backend: Annotated[
        Backend,
        typer.Option(
            help="What computes the target: torch, or openvino on a CPU (faster, checked against torch).",
            rich_help_panel=_MODEL,
        ),
    ] = Backend.auto


@dataclass(frozen=True)
class DraftOptions:
    """How drafts are made; `draft_depth` is the depth of a tree or the length of a chain."""

    draft: Annotated[
        str,
        typer.Option(
            metavar="tree|chain|none|METHOD",
            help="Draft a tree or a chain with the head, nothing, or by another method, also MODULE:ATTRIBUTE.",
            rich_help_panel=_DRAFT,
        ),
    ] = "tree"
    draft_depth: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=limits.DRAFT_DEPTH,
            help="Tokens drafted one after another.",
            show_default="tree: 3 on a CPU, else 8; chain: 4",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    draft_top_k: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=limits.DRAFT_TOP_K,
            help="Children of a node, and nodes kept at a level.",
            show_default="6 on a CPU, else 10",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    draft_nodes: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=limits.DRAFT_NODES,
            help="Nodes of a tree that are verified, root included.",
            show_default="10 on a CPU, else 60",
            rich_help_panel=_DRAFT,
        ),
    ] = None
    layer_ids: LayerIdsOption = LayerIds.auto
    force_head: Annotated[
        bool,
        typer.Option(
            "--force-head",
            help="Accept a head trained for other weights of the same shape.",
            rich_help_panel=_DRAFT,
        ),
    ] = False

    def __post_init__(self) -> None:
        """Raises `TercelError` if there is no such method: before anything is loaded for it."""
        if self.draft not in SHAPES:
            check_known(self.draft, tuple(SHAPES))
        if ":" in self.draft:
            proposer_kind(self.draft)

    @property
    def method(self) -> str:
        """The proposer's name."""
        return SHAPES.get(self.draft, self.draft)

    def require_drafts(self) -> None:
        """For a verb that compares drafts with nothing. Raises `TercelError` for `--draft none`."""
        if self.method == VANILLA:
            raise TercelError("--draft none drafts nothing, so there is nothing to compare; give tree or chain")

    def require_head_drafts(self) -> None:
        """For a verb that compares the head's drafts. Raises `TercelError` if `--draft` asks for none, or another's."""
        self.require_drafts()
        if self.draft not in SHAPES:
            raise TercelError(f"--draft {self.draft} is not the shape of the head's drafts; give tree or chain")


def _asked_or_configured(meaning: str) -> Any:
    return typer.Option(help=meaning, show_default="the model's generation config", rich_help_panel=_SAMPLING)


Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", show_default="0", rich_help_panel=_SAMPLING)]
Sample = Annotated[
    bool,
    typer.Option(
        "--sample",
        help="Draw tokens with the values of the model's generation config, where none are given.",
        rich_help_panel=_SAMPLING,
    ),
]
FollowConfig = Annotated[
    bool,
    typer.Option(
        "--generation-config/--no-generation-config",
        help="Follow the model's generation config: penalties, forbidden tokens, lengths.",
        rich_help_panel=_SAMPLING,
    ),
]


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are picked and where an answer ends."""

    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum tokens per answer.", rich_help_panel=_SAMPLING)
    ] = 256
    temperature: Temperature = None
    sample: Sample = False
    top_k: Annotated[int | None, _asked_or_configured("0 is off.")] = None
    top_p: Annotated[float | None, _asked_or_configured("1 is off.")] = None
    min_p: Annotated[float | None, _asked_or_configured("0 is off.")] = None
    repetition_penalty: Annotated[float | None, _asked_or_configured("1 is off.")] = None
    presence_penalty: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=VALUE",
            help="Add to a token's logit; may be repeated.",
            show_default=False,
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(help="Makes sampling repeatable.", show_default="a fresh one", rich_help_panel=_SAMPLING),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="End before this text; may be repeated.",
            show_default=False,
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    generation_config: FollowConfig = True

    def asked(self) -> Asked:
        """Raises `TercelError` for a value outside its range."""
        from tercel.decode.generation_config import Asked

        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("sample", "generation_config")}
        read = {"logit_bias": parse_logit_bias(self.logit_bias or ()), "stop": tuple(self.stop) if self.stop else None}
        return Asked({**given, **read}, self.sample, self.generation_config)


def parse_logit_bias(pairs: list[str] | tuple[str, ...]) -> dict[int, float]:
    """`["17=2.5", …]` to `{17: 2.5}`. Raises `TercelError` for anything else."""
    bias: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError as error:
            raise TercelError(f"--logit-bias {pair!r} is not ID=VALUE, such as 17=-2.5") from error
    return bias
