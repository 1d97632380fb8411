"""Options of sampling that several verbs share, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tercel.errors import TercelError
from tercel.reading import short

if TYPE_CHECKING:
    from tercel.decode.generation_config import Asked

_SAMPLING = "Sampling"


def _asked_or_configured(meaning: str) -> Any:
    return typer.Option(help=meaning, show_default="the model's generation config", rich_help_panel=_SAMPLING)


Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", show_default="0", rich_help_panel=_SAMPLING)]
Temperatures = Annotated[
    str | None,
    typer.Option(
        help="0 is greedy; several with commas between are measured one after the other.",
        show_default="0",
        rich_help_panel=_SAMPLING,
    ),
]
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


def parse_temperatures(text: str | None) -> list[float | None]:
    """`"0,1"` to `[0.0, 1.0]`, None to what nobody asked for. Raises `TercelError` for what is no number."""
    if text is None:
        return [None]
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise TercelError(f"--temperature {short(text)} is no number, nor several with commas between") from error
    if len(set(found)) < len(found):
        raise TercelError(f"--temperature {short(text)} names one twice; name each once")
    return [*found]


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
