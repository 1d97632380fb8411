"""`tercel serve`: an OpenAI-compatible server on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tercel.cli.consoles import say
from tercel.cli.groups import with_groups
from tercel.cli.models import open_proposer, open_target, say_notes
from tercel.cli.options import NOTHING, DecodingModelOptions, DraftOptions, HeadName, TargetName
from tercel.cli.paths import user_path
from tercel.decode.proposers import EAGLE3
from tercel.errors import TercelError
from tercel.files import write_json

_SERVER = "Server"


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, and how much it takes at a time."""

    host: Annotated[
        str,
        typer.Option(help="Listen there; the default is for this machine alone.", rich_help_panel=_SERVER),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Its port; 0 takes any that is free.", rich_help_panel=_SERVER)
    ] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Answer who gives this key only.", show_default=False, rich_help_panel=_SERVER
        ),
    ] = None
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="VAR",
            help="The environment variable that holds the key, which others on this machine see in --api-key.",
            show_default=False,
            rich_help_panel=_SERVER,
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What clients call the model.",
            show_default="as TARGET is called",
            rich_help_panel=_SERVER,
        ),
    ] = None
    slots: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.", rich_help_panel=_SERVER)] = 8
    queue: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; beyond, clients are told to.", rich_help_panel=_SERVER)
    ] = 64
    prefix_cache: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="MB",
            help="Keep in that much what was computed of texts, for prompts that begin alike; 0 keeps none.",
            rich_help_panel=_SERVER,
        ),
    ] = 512
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a request may take.", rich_help_panel=_SERVER)
    ] = 600.0
    grace: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds that answers get to end in when the server is stopped.", rich_help_panel=_SERVER
        ),
    ] = 20.0
    json_ready: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=user_path,
            help='Write {"url", "pid"} there when requests are accepted.',
            show_default=False,
            rich_help_panel=_SERVER,
        ),
    ] = None

    @property
    def key(self) -> str | None:
        """Raises `TercelError` if it is given twice, or the variable holds none."""
        if self.api_key_env is None:
            return self.api_key
        if self.api_key is not None:
            raise TercelError("both --api-key and --api-key-env are given; give one of them")
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise TercelError(f"the environment variable {self.api_key_env} of --api-key-env holds no key; set it")
        return key


@with_groups
def command(
    target: TargetName,
    model: DecodingModelOptions,
    draft: DraftOptions,
    server: ServerOptions,
    head: HeadName = None,
) -> None:
    """Serve the target with OpenAI's HTTP interface; many requests are decoded together, each as it would be alone.

    Ctrl-C or SIGTERM lets answers end for some seconds, then cuts them. Servers for several machines or GPUs: `tercel
    serve-command`.
    """
    draft.require_lossless("what is served")
    _require_extra()
    from tercel.serve.running import bound, serve
    from tercel.serve.settings import ServerSettings

    settings = ServerSettings(
        name=server.name or target,
        host=server.host,
        port=server.port,
        api_key=server.key,
        slots=server.slots,
        queue=server.queue,
        prefix_cache=server.prefix_cache,
        timeout=server.timeout,
        grace=server.grace,
    )
    with bound(settings) as taken:
        loaded = open_target(target, model)
        loaded.expect_many()
        proposer = open_proposer(head, loaded, _with_what_there_is(head, target, draft), slots=settings.slots)
        if not settings.only_here and settings.api_key is None:
            say(f"note: whoever reaches {settings.host} can ask this server; --api-key-env VAR asks for a key")

        def ready(url: str) -> None:
            if server.json_ready is not None:
                write_json(server.json_ready, {"url": url, "pid": os.getpid()})
            say(f"serving {settings.name} at {url}/v1 (Ctrl-C ends it)")

        serve(loaded, proposer, settings, taken, ready)
    say_notes(proposer)


def _with_what_there_is(head: str | None, target: str, draft: DraftOptions) -> DraftOptions:
    """Without drafts where no head is named and none is shipped, and nothing else was asked for."""
    from tercel.heads import shipped

    if draft.method != EAGLE3 or head is not None or shipped(target) is not None:
        return draft
    say(f"note: no head is shipped for {target}, so it is served without drafts; name one to draft with")
    return DraftOptions(draft=NOTHING)


def _require_extra() -> None:
    """Raises `TercelError` if the packages that serve are not installed."""
    try:
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401
        import pydantic  # noqa: F401
        import sse_starlette  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise TercelError(
            f"serving needs the package {error.name}; install it with: pip install 'tercel[serve]'"
        ) from error
