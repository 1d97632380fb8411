"""`tercel push`: a head, with its card, to the Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from tercel.cli.consoles import result_console
from tercel.cli.options import OnlyHead


def command(
    head: OnlyHead,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Where it goes on the Hub.")],
    data_licence: Annotated[
        str, typer.Option(metavar="TEXT", help="Licence of the training data, for the card.", show_default=False)
    ] = "",
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    message: Annotated[
        str, typer.Option(metavar="TEXT", help="The commit's message.", show_default="Upload an EAGLE-3 draft head")
    ] = "",
) -> None:
    """Publish a head on the Hugging Face Hub, with its measured acceptance and the licence of its data."""
    from tercel.interop.hub import from_pretrained, push_to_hub

    model = from_pretrained(head)
    address = push_to_hub(model, repository, data_licence=data_licence, private=private, message=message)
    result_console().print_line(f"published: {address}")
