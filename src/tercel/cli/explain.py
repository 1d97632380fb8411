"""`tercel explain`: how an answer was decoded, step by step."""

from __future__ import annotations

import secrets
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from rich.tree import Tree

from tercel.cli.consoles import STANDARD_OUTPUT, Piece, PlainConsole, result_console, working
from tercel.cli.groups import with_groups
from tercel.cli.models import open_proposer, open_sampling, open_target, say_notes
from tercel.cli.options import DecodingModelOptions, DraftOptions, HeadName, JsonFile, TargetName
from tercel.cli.paths import user_path
from tercel.cli.prompt_options import PromptOptions
from tercel.cli.sampling_options import SamplingOptions
from tercel.errors import TercelError
from tercel.files import write_json, write_text

if TYPE_CHECKING:
    from tercel.decode.engine import Engine
    from tercel.decode.sampling import SamplingParams
    from tercel.decode.types import Request
    from tercel.explain.steps import Explanation, Step


@with_groups
def command(
    target: TargetName,
    model: DecodingModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    prompt: PromptOptions,
    head: HeadName = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=user_path,
            help="Write a page there that needs no other file and no network.",
            show_default=False,
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Answer a prompt and show every step: the draft tree with its probabilities, the path that was accepted, and what
    the target chose.

    As text, as a page for a browser (--html) and with every number (--json). Prompt and answer are in all of them.
    """
    if html in STANDARD_OUTPUT and json_file in STANDARD_OUTPUT:
        raise TercelError("both --html and --json ask for standard output; give one of them a file")
    asked = sampling.asked()
    text = prompt.read()
    loaded = open_target(target, model)
    ids = prompt.tokens(loaded.tokenizer, text)
    params = open_sampling(asked, loaded)
    if not params.greedy and params.seed is None:
        params = replace(params, seed=secrets.randbits(32))  # told, so that the same can be seen again
    proposer = open_proposer(head, loaded, draft)
    from tercel.decode.engine import Engine
    from tercel.decode.types import Request
    from tercel.explain.page import page
    from tercel.explain.words import LEGEND, total

    rule = proposer.lossy
    facts = {
        "tercel": version("tercel"),
        "target": target,
        **({} if head is None else {"head": head}),
        "method": draft.method,
        "tree": draft.tree,
        **({} if rule is None else {"lossy": rule.title}),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "backend": loaded.backend,
        "sampling": sampling_facts(params),
    }
    console = result_console(html, json_file)
    with working("decoding"):
        explanation = explained(Engine(loaded, proposer), Request(ids, params, traced=True), facts)
    if json_file is not None:
        write_json(json_file, explanation.to_json())
    if html is not None:
        write_text(html, page(explanation))
    for step in explanation.steps:
        print_step(console, step)
    console.print_line(LEGEND, "dim")
    console.print_line(total(explanation) + ("" if rule is None else f"; lossy: {rule.title}"), "bold")
    if html is not None and html not in STANDARD_OUTPUT:
        console.print_line(f"page  {html}")
    say_notes(proposer)
    explanation.result.require()


def sampling_facts(params: SamplingParams) -> dict[str, Any]:
    """What is not at its default, and the temperature."""
    default = type(params)()
    pairs = {f.name: (getattr(params, f.name), getattr(default, f.name)) for f in fields(params)}
    changed = {name: value for name, (value, usual) in pairs.items() if value != usual}
    if "rules" in changed:  # of which the ends are the target's, and nothing that was asked for
        plain = asdict(default.rules)
        own = {name: value for name, value in asdict(params.rules).items() if value != plain[name]}
        del changed["rules"]
        own.pop("eos_token_ids", None)
        changed.update(own)
    return {"temperature": params.temperature, **changed}


def explained(engine: Engine, request: Request, facts: dict[str, Any]) -> Explanation:
    """Every step of a traced request's answer. Raises the error of a request that fails before its first token."""
    from tercel.chat.tokenizing import detokenize
    from tercel.explain.steps import Explanation, Narrator

    tokenizer = engine.target.tokenizer
    narrator, result = Narrator(tokenizer, request.params.stop), None
    steps: list[Step] = []
    for event in engine.stream([request]):
        step, result = narrator.of(event), event.result
        if step is not None:
            steps.append(step)
    assert result is not None
    if not steps:
        result.require()
    return Explanation(detokenize(tokenizer, request.prompt, clean_up=False), tuple(steps), result, facts)


def print_step(console: PlainConsole, step: Step) -> None:
    from tercel.explain.words import headline, standing, told

    console.print_line(headline(step), "bold")
    console.print_line(standing(step), "dim")
    if len(step.trace.nodes) > 1:
        console.print(drawn(step))
    for place in range(len(step.trace.choices)):
        console.print(Text(f"  {told(step, place)}"))
    console.print()


def drawn(step: Step) -> Tree:
    """The step's tree, the target's own token at the end of the accepted path."""
    from tercel.explain.draw import scores
    from tercel.explain.pieces import shown

    nodes, path = step.trace.nodes, step.trace.path
    branches: list[Tree] = []
    for number, node in enumerate(nodes):
        accepted = number in path
        label = Text.assemble(
            (shown(step.names[number]), "green bold" if accepted else "" if number == 0 else "dim"),
            _after(scores(step, number)),
            ("  ✓" if accepted else "", "green"),
        )
        branches.append(Tree(label) if number == 0 else branches[node.parent].add(label))
    own = f"({shown(step.taken[-1])})"
    branches[(0, *path)[-1]].add(Text.assemble((own, "cyan bold"), _after(scores(step, len(nodes)))))
    return branches[0]


def _after(scores: list[str]) -> Piece:
    return "".join(f"  {score}" for score in scores), "dim"
