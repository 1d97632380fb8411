"""Options that several verbs share, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from tercel.cli.paths import user_name, user_names, user_path
from tercel.decode.proposers import EAGLE3, SPS, VANILLA, check_known, proposer_kind
from tercel.errors import TercelError
from tercel.reading import short
from tercel.target_model.backend_names import AUTO, INT8, OPENVINO, TORCH

if TYPE_CHECKING:
    from tercel.draft.shape import TreeShape

_MODEL, _DRAFT = "Model", "Draft"

TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        parser=user_name,
        help="A model's folder, a GGUF file, a built-in name, or owner/name of the Hub.",
    ),
]
Conversations = Annotated[
    list[str],
    typer.Option(
        metavar="FILE", parser=user_name, help="Conversations: a file, a data set's name, org/name of the Hub."
    ),
]
PlainText = Annotated[bool, typer.Option("--plain", help='Take {"text"} rows as plain text for a base model.')]
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
HeadsFile = Annotated[
    Path | None,
    typer.Option(
        "--heads",
        metavar="FILE.yaml|json",
        parser=user_path,
        help="Heads of several methods: a file of NAME: FOLDER, or NAME: {method: METHOD, head: FOLDER, tree: SHAPE}.",
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


class Weights(StrEnum):
    int8 = INT8


NOTHING = "none"  # of `--draft`: no proposer's name, but what a user calls it


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
    weights: Annotated[
        Weights | None,
        typer.Option(
            help="Round the target's matrices to int8, a scale for each output channel: another model, less to read.",
            show_default="as they are stored",
            rich_help_panel=_MODEL,
        ),
    ] = None


@dataclass(frozen=True)
class DraftOptions:
    """How drafts are made."""

    draft: Annotated[
        str,
        typer.Option(
            metavar="eagle3|none|METHOD",
            help="Draft with the head, not at all, or by another method (`tercel methods`), also MODULE:ATTRIBUTE.",
            rich_help_panel=_DRAFT,
        ),
    ] = EAGLE3
    tree: Annotated[
        str,
        typer.Option(
            metavar="auto|TOPKxDEPTHxNODES|chain:N",
            help="How large drafts are: auto, as large as pays, step by step; or children of a node, levels and nodes "
            "verified, root included (10x8x60 in the paper); or N tokens one after another.",
            rich_help_panel=_DRAFT,
        ),
    ] = AUTO
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            parser=user_name,
            help="A second, smaller model of the same tokenizer that drafts, for --draft sps; named as TARGET is.",
            show_default=False,
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
        """Raises `TercelError` if there is no such method or tree: before anything is loaded for it."""
        if self.draft != NOTHING:
            check_known(self.draft, (NOTHING,))
        if ":" in self.draft:
            proposer_kind(self.draft)
        _ = self.shape

    @property
    def method(self) -> str:
        """The proposer's name."""
        return VANILLA if self.draft == NOTHING else self.draft

    @property
    def shape(self) -> TreeShape | None:
        """How large drafts are; None for as large as pays."""
        if self.tree == AUTO:
            return None
        from tercel.draft.shape import parse_shape

        try:
            return parse_shape(self.tree)
        except TercelError as error:
            raise TercelError(f"--tree {short(self.tree)}: {error}") from error

    def require_use_of_model(self, *names: str) -> None:
        """Raises `TercelError` for a `--draft-model` that none of the methods drafts with."""
        if self.draft_model is not None and not any("model" in proposer_kind(name).needs for name in names):
            raise TercelError(
                f"--draft-model is of no use to {', '.join(names)}; ask for {SPS}, which needs one, or leave it out"
            )

    def require_lossless(self, what: str) -> None:
        """For a verb that gives `what` on as the model's own. Raises `TercelError` for a method that changes text."""
        if proposer_kind(self.method).lossy:
            raise TercelError(f"--draft {self.method} is lossy, so {what} would not be the model's own; use another")

    def require_drafts(self) -> None:
        """For a verb that compares drafts with nothing. Raises `TercelError` for `--draft none`."""
        if self.method == VANILLA:
            raise TercelError("--draft none drafts nothing, so there is nothing to compare; leave it out")

    def require_head_drafts(self) -> None:
        """For a verb that compares the head's drafts. Raises `TercelError` if `--draft` asks for none, or another's."""
        self.require_drafts()
        if self.method != EAGLE3:
            raise TercelError(f"--draft {self.draft} does not draft with the head; name it with --methods")
