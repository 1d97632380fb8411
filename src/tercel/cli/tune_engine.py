"""`tercel tune --engine X`: what another engine should draft, from what it would accept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tercel import limits
from tercel.cli.consoles import counting_bar, result_console
from tercel.cli.export import gguf_file
from tercel.cli.paths import tercel_command, user_path
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.heads import known_as
from tercel.interop.engines import ENGINES, ServingEngine

if TYPE_CHECKING:
    from tercel.decode.sampling import SamplingParams
    from tercel.doctor.engine_client import EngineClient
    from tercel.doctor.step_time import ServedSteps
    from tercel.draft import DraftModel
    from tercel.draft.shape import TreeShape
    from tercel.measure.tasks import Prompt, Task
    from tercel.measure.tune_there import EngineCosts
    from tercel.target_model.model import Target

_THERE = "For another engine"
_ASKED = ", ".join(name for name, engine in ENGINES.items() if engine.tells_counters)
_GGUF = "TARGET.gguf"  # where none is known


@dataclass(frozen=True)
class ThereOptions:
    """What is known of the other engine. None is left out."""

    longest: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=limits.DRAFT_DEPTH,
            help="Tokens drafted one after another, at most.",
            show_default="8",
            rich_help_panel=_THERE,
        ),
    ] = None
    cost_json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=user_path,
            help='What steps cost there: {"forward_ms": {"1": ms, "4": ms, …}, "draft_ms": ms}, by verified tokens.',
            show_default=False,
            rich_help_panel=_THERE,
        ),
    ] = None
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=f"A running server with a head, whose steps are timed ({_ASKED}).",
            show_default=False,
            rich_help_panel=_THERE,
        ),
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds to wait for an answer of it.", show_default="120", rich_help_panel=_THERE),
    ] = None


def what_is_known(there: ThereOptions, engine: str) -> tuple[EngineClient | None, EngineCosts | None]:
    """The server to be timed and the costs that are given; to be asked before anything is loaded.

    Raises `TercelError` if the server cannot be asked or the file holds no costs.
    """
    server, costs = None, None
    if there.url is not None:
        from tercel.doctor.clients import connect
        from tercel.http.client import TIMEOUT, Http

        server = connect(Http.at(there.url, there.timeout or TIMEOUT), ENGINES[engine].run_by)
    if there.cost_json is not None:
        from tercel.measure.tune_there import read_costs

        costs = read_costs(there.cost_json)
    return server, costs


def tune_there(
    engine: ServingEngine,
    there: ThereOptions,
    server: EngineClient | None,
    costs: EngineCosts | None,
    target: Target,
    head: DraftModel,
    tasks: Sequence[Task],
    params: SamplingParams,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Simulate, decide and print. Raises `TercelError` for a head that the engine cannot run, and if no prompt leaves
    room for an answer."""
    from tercel.interop.engines.limits import check_expressible
    from tercel.measure.tune_report import plot_simulation, simulation_table
    from tercel.measure.tune_there import LONGEST, TREES, engine_verdict, settings_json, simulate_drafts

    head = replace(head, head=head.eagle3)
    warnings = check_expressible(engine, head.head.config, head.vocabulary, target.config.model_type)
    prompts, skipped = _that_fit(target, head, tasks, params.max_new_tokens)
    trees = TREES if engine.drafts_trees and target.tree_support.tree else ()
    with counting_bar("answers") as bar:
        found = simulate_drafts(
            target,
            head,
            prompts,
            params,
            longest=there.longest or LONGEST,
            trees=trees,
            progress=lambda done, total: bar(done, total, ""),
        )
    served = None if server is None else _timed(server, prompts, params.max_new_tokens)
    if served is not None and costs is not None:
        costs = costs.with_step(served.draft, served.ms.value)
    told = engine_verdict(engine.title, found, costs)
    lines = _lines(engine, target, head, told.launched)
    try:  # files first: a screen may fail
        if json_file is not None:
            value: dict[str, Any] = {
                "engine": engine.name,
                "target": target.source.name,
                "head": known_as(head.path),
                "answers": found.answers,
                "acceptance": list(found.acceptance),
                "settings": settings_json(found, costs),
                "costs": None if costs is None else asdict(costs),
                "server": None if served is None else served.to_json(),
                "use": None if told.shape is None else asdict(told.shape),
                "speedup": None if told.speedup is None else told.speedup.value,
                "speedup_ci95": None if told.speedup is None else told.speedup.ci95,
                "verdict": told.sentence,
                "commands": lines,
                "skipped": skipped,
                "sampling": asdict(params),
            }
            write_json(json_file, value)
        if plot is not None:
            plot_simulation(engine.title, found, costs, plot)
    finally:
        console = result_console(json_file, plot)
        console.print(simulation_table(engine.title, found, costs))
        chances = " ".join(f"{value:.3f}" for value in found.acceptance)
        console.print_line(f"the first drafts of a chain, all accepted, by number: {chances}")
        if skipped:
            console.print_line(f"note: skipped, no room for an answer: {', '.join(skipped)}")
        for warning in warnings:
            console.print_line(f"warning: {warning}", "yellow")
        if served is not None:
            console.print_line(served.sentence(engine.title))
        console.print_line(told.sentence, "bold")
        for line in lines:
            console.print_text([(f"{line}\n", "")])


def _that_fit(
    target: Target, head: DraftModel, tasks: Sequence[Task], max_new_tokens: int
) -> tuple[list[Prompt], list[str]]:
    """First turns that leave room for an answer, and ids of the others. Raises `TercelError` if none does."""
    from tercel.doctor.compare import room
    from tercel.measure.tasks import first_prompts

    prompts = first_prompts(target.tokenizer, tasks)
    fit = [prompt for prompt in prompts if len(prompt.tokens) + max_new_tokens <= room(target, head)]
    if not fit:
        raise TercelError(
            f"no prompt leaves room for {max_new_tokens} new tokens in the {room(target, head)} positions of head and "
            "target; give shorter --data or lower --max-new-tokens"
        )
    return fit, [prompt.id for prompt in prompts if prompt not in fit]


def _timed(server: EngineClient, prompts: Sequence[Prompt], max_new_tokens: int) -> ServedSteps:
    from tercel.doctor.step_time import time_steps

    with counting_bar("server") as bar:
        return time_steps(server, prompts, max_new_tokens, lambda done, total: bar(done, total, ""))


def _lines(engine: ServingEngine, target: Target, head: DraftModel, shape: TreeShape) -> list[str]:
    """What exports the head, and what starts the engine with it."""
    from tercel.interop.served_target import served_target

    name, out = target.source.name, Path(f"head-{engine.name}")
    address = served_target(head, name, ask_hub=False).address
    if engine.takes_gguf:
        address = str(gguf_file(name) or _GGUF)
    export = ["export", known_as(head.path), "--to", engine.name, "--out", str(out), "--target"]
    export += [address if engine.takes_gguf else name, "--depth", str(shape.depth)]
    return [tercel_command(*export), engine.start(out, address, shape)]
