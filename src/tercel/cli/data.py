"""`tercel data`: look at training conversations and clean them of evaluation prompts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tercel.cli.consoles import Piece, result_console
from tercel.cli.options import JsonFile, PlainText, TemplateArgs
from tercel.cli.paths import user_name, user_path
from tercel.errors import TercelError
from tercel.files import as_json_line, atomic_file, require_free, write_json
from tercel.plain import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tercel.chat import LoadReport, OverlapReport, TokenizedChat

app = typer.Typer(help="Look at training conversations, clean them, have them answered.", no_args_is_help=True)

Source = Annotated[
    str, typer.Argument(parser=user_name, help="A file, the name of a data set, or org/name[:split] of the Hub.")
]
Samples = Annotated[int, typer.Option("--samples", "-n", min=0, help="How many samples to print.")]
EvalFiles = Annotated[
    list[Path] | None,
    typer.Option(metavar="PATH", parser=user_path, help="Drop what overlaps with this file; may be repeated."),
]


@app.command()
def show(
    file: Source,
    target: Annotated[
        str,
        typer.Option(metavar="TARGET", parser=user_name, help="The model whose tokenizer and chat template are used."),
    ],
    samples: Samples = 3,
    plain: PlainText = False,
    last_turn: Annotated[
        bool, typer.Option("--last-turn", help="Colour the answer to the last question alone.")
    ] = False,
    check_overlap: EvalFiles = None,
    max_length: Annotated[int, typer.Option(min=2, help="Cut longer rows, in tokens.")] = 2048,
    limit: Annotated[int | None, typer.Option(min=1, help="Read at most that many rows.")] = None,
    json_file: JsonFile = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Accept the licence of a built-in target that asks for it.")
    ] = False,
    template_arg: TemplateArgs = None,
) -> None:
    """Print samples with the assistant's tokens in colour, and count what is kept and dropped."""
    from tercel.chat import OverlapIndex, load_chats, read_eval_prompts
    from tercel.chat.arguments import parse_arguments, with_arguments
    from tercel.target_model.sources import load_tokenizer

    arguments = parse_arguments(template_arg or ())
    tokenizer = with_arguments(load_tokenizer(target, trust_remote_code, accept_licence), arguments)
    against = OverlapIndex.of(read_eval_prompts(check_overlap)) if check_overlap else None
    chats, report = load_chats(
        [file], tokenizer, max_length=max_length, limit=limit, plain=plain, last_turn=last_turn, against=against
    )
    if json_file is not None:
        write_json(json_file, report.to_json())
    console = result_console(json_file)
    for chat in chats[:samples]:
        console.rule(Text(visible(chat.id)))
        console.print_text([*coloured(chat, tokenizer), ("\n", "")])
    console.print(counts_table(report))
    for note in report.notes:
        console.print_line(f"note: {note}")
    for overlap in report.overlaps[:samples]:
        console.print_line(f"{overlap.id}: {overlap.kind} overlap with {overlap.eval_id}: {overlap.shared}")


@app.command()
def clean(
    file: Source,
    against: Annotated[
        list[Path], typer.Option(metavar="PATH", parser=user_path, help="An evaluation file; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(metavar="PATH", parser=user_path, help="The JSONL file to write.")],
    ngram: Annotated[int, typer.Option(min=2, help="Words in a row that count as an overlap.")] = 13,
    samples: Samples = 3,
) -> None:
    """Write the conversations whose prompts overlap with no evaluation prompt, as `messages` JSONL."""
    from tercel.chat import find_overlaps, read_conversations, read_eval_prompts

    require_free(out)
    notes: list[str] = []
    report = find_overlaps(read_conversations(file, notes=notes), read_eval_prompts(against), ngram)
    if not report.kept:
        raise TercelError(f"every one of the {report.read} conversations of {file} overlaps; nothing to write")
    with atomic_file(out) as partial, partial.open("w", encoding="utf-8") as stream:
        for conversation in report.kept:
            stream.write(as_json_line(conversation.to_json()))
    console = result_console(out)
    for line in [*notes, *overlap_lines(report, samples)]:
        console.print_line(line)
    console.print_line(f"{len(report.kept)} of {report.read} conversations written to {out}")


def coloured(chat: TokenizedChat, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """The chat's text, the assistant's tokens green and the others dim."""
    from tercel.chat.tokenizing import detokenize

    for supervised, run in groupby(zip(chat.tokens.tolist(), chat.supervised.tolist(), strict=True), lambda p: p[1]):
        yield detokenize(tokenizer, [token for token, _ in run]), "bold green" if supervised else "dim"


def counts_table(report: LoadReport) -> Table:
    table = Table("", "count")
    rows = {
        "conversations read": report.read,
        "conversations kept": report.kept,
        "token rows": report.chats,
        "  cut at the maximum length": report.truncated,
        "assistant turns": report.turns,
        "tokens": report.tokens,
        "assistant tokens": report.supervised,
        **{f"dropped: {reason}": count for reason, count in report.dropped.items()},
        **{f"turns dropped: {reason}": count for reason, count in report.dropped_turns.items()},
    }
    for name, count in rows.items():
        table.add_row(name, f"{count:,}")
    return table


def overlap_lines(report: OverlapReport, samples: int) -> Iterator[str]:
    """Counts by kind, then the first `samples` overlaps."""
    yield ", ".join(f"{count} {kind}" for kind, count in sorted(report.counts.items())) or "no overlaps"
    for overlap in report.overlaps[:samples]:
        yield f"{overlap.id}: {overlap.kind} overlap with {overlap.eval_id}: {overlap.shared}"
