"""The model card: what a head is for, what it learned from, how well it does, how to run and to serve it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tercel.draft import DraftModel, Eagle3Head
from tercel.draft.history import DecodingRecord, HeldOut, MeasuredRecord, Recipe, TrainingRecord
from tercel.draft.kinds import methods_of
from tercel.interop.engines import SERVED_AND_ASKED

_RESULTS = "## Measured"

_OPTIMIZERS = {"adamw": "AdamW (0.9, 0.95)", "muon": "Muon (0.95) for matrices, AdamW (0.9, 0.95) for the rest"}


def head_card(model: DraftModel) -> str:
    """Markdown for a checkpoint's README.md, with the front matter that the Hub reads; only from what `model` holds."""
    info = model.info
    name = info.target_name or ""
    licence = info.training.data_licence or ""
    parts = [
        _front_matter(model, name, licence),
        _opening(model, name),
        _commands(model, name or "TARGET") + (_serving(name or "TARGET") if _is_eagle3(model) else ""),
        f"{_RESULTS}\n{_measured(info.measured)}\n",
        f"## Data\n{_data(info.training, licence)}\n",
        f"## Recipe\n{_recipe(model)}\n",
    ]
    return "\n".join(parts)


def with_results(card: str, measured: MeasuredRecord) -> str:
    """A card that somebody edited, with only its section of results made anew (added, if it has none)."""
    section = f"{_RESULTS}\n{_measured(measured)}\n"
    before, found, rest = card.partition(f"{_RESULTS}\n")
    if not found:
        return f"{card.rstrip()}\n\n{section}"
    heading = rest.find("\n## ")
    return before + section + (rest[heading:] if heading >= 0 else "")


def _is_eagle3(model: DraftModel) -> bool:
    return isinstance(model.head, Eagle3Head)


def _front_matter(model: DraftModel, name: str, licence: str) -> str:
    kind = "eagle3" if _is_eagle3(model) else model.head.config.kind
    lines = ["---", "library_name: tercel", f"tags: [{kind}, speculative-decoding, draft-head]"]
    lines += [f"base_model: {name}"] if name else []
    lines += ["license: other", f"license_name: {_quoted(licence)}"] if licence else []
    return "\n".join([*lines, "---"])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _opening(model: DraftModel, name: str) -> str:
    whose = f"`{name}`" if name else "its target (which its files do not name)"
    title, what = ("EAGLE-3", "One decoder layer") if _is_eagle3(model) else (model.head.title, model.head.in_words())
    return f"""# {title} draft head for {name or "an unnamed target"}

{what} ({model.head.num_parameters() / 1e6:.1f} M parameters) that drafts tokens for {whose}; the
target verifies every one, so the text is the target's own. It is of no use with another model.
"""


def _commands(model: DraftModel, name: str) -> str:
    name, method = shlex.quote(name), methods_of(model.head.config.kind, model.info.training)[0]
    drafting, compared = ("", "") if _is_eagle3(model) else (f" --draft {method}", f" --methods vanilla,{method}")
    return f"""```
tercel generate {name} .{drafting} --prompt "Why is the sky blue?"
tercel bench {name} .{compared}
```
"""


def _serving(name: str) -> str:
    exports = "\n".join(f"tercel export . --to {engine} --out head-{engine}" for engine in SERVED_AND_ASKED)
    name = shlex.quote(name)
    serving = "\n".join(
        f"tercel serve-command head-{engine} --engine {engine} --target {name}" for engine in SERVED_AND_ASKED
    )
    return f"""
## Serve
Engines differ in what they take a checkpoint to mean; the export is written and checked for one of them, and the
last line prints how to start it.

```
{exports}
{serving}
```
"""


def _measured(measured: MeasuredRecord) -> str:
    found = []
    if held_out := measured.held_out:
        found.append(
            f"Held-out acceptance of a greedy {len(held_out.alpha)}-step chain ({held_out_basis(held_out)}): "
            f"τ = {held_out.tau:.3f}, n-α = " + " ".join(f"{value:.3f}" for value in held_out.alpha) + "."
        )
    found += [_decoding(run) for run in measured.decoding]
    return "\n\n".join(found) or "Nothing yet; `tercel bench … --record` writes its result here."


def held_out_basis(held_out: HeldOut) -> str:
    """What a head's held-out figures are means over: heads of earlier versions count rows, and their τ is higher than
    that of decoding."""
    if held_out.steps is not None:
        return f"over the {held_out.steps:,} steps that decoding makes on those answers"
    return f"joint-prefix estimate over {held_out.rows:,} rows, some percent above decoding"


def _decoding(run: DecodingRecord) -> str:
    """A run of `tercel bench --record` as a table."""
    rows = [
        f"| {task} | {m.questions} | {'–' if m.tau is None else format(m.tau, '.2f')} | "
        f"{m.speedup:.2f}{_interval(m.speedup_ci95)} |"
        for task, m in run.tasks.items()
    ]
    return "\n".join(
        [
            f"Decoding: {run.shape}, {run.dtype} on {run.device}, temperature {run.temperature:g}, at most "
            f"{run.max_new_tokens} new tokens, against token-by-token decoding (95 % intervals):",
            "",
            "| task | questions | τ | speedup |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def _interval(ci95: Sequence[float] | None) -> str:
    """Empty for a single question, which tells nothing of the spread."""
    return "" if ci95 is None else f" [{ci95[0]:.2f}, {ci95[1]:.2f}]"


def _data(training: TrainingRecord, licence: str) -> str:
    if training.conversations is None:
        return "Not recorded in the head's files."
    names = ", ".join(training.data or ()) or "not recorded"
    terms = (
        f"Licence of the data: {licence}."
        if licence
        else "Licence of the data: not stated (`data-licence` of `tercel train`); it binds the use of the head."
    )
    return (
        f"{names}: {training.conversations:,} conversations, {training.tokens:,} tokens, of which\n"
        f"{training.supervised_tokens:,} are the assistant's and were learned from. {terms}"
    )


def _recipe(model: DraftModel) -> str:
    c, training = model.head.config, model.info.training
    recipe = training.recipe
    features = f"Features: {model.head.reads_in_words()}."
    if c.own_embeddings:
        features += f" Embeddings of its own ({training.embeddings or 'not recorded whether trained'})."
    vocabulary = f"Draft vocabulary: {c.draft_vocab_size:,} of {c.vocab_size:,} tokens"
    if recipe is None:
        return f"Not recorded in the head's files. {features} {vocabulary}."
    optimizer = _OPTIMIZERS.get(recipe.optimizer, recipe.optimizer)
    taught = f"Training-time test with S = {recipe.ttt_steps}, loss `{recipe.loss}`, step decay {recipe.decay}"
    if recipe.method != Recipe.method:
        taught = f"Method `{recipe.method}`, loss `{recipe.loss}`, measured on chains of {recipe.ttt_steps} drafts"
    return f"""{taught},
{optimizer}, learning rate {recipe.lr:g}, clip {recipe.clip:g}, {recipe.epochs} epochs,
{training.step} of {training.steps} steps, {training.dtype} compute with float32 master weights. {features}
{vocabulary}, {training.draft_vocabulary_coverage:.1%} of the supervised text."""
