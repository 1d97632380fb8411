"""README.md of an exported folder: what it is, how to start the engine with it, what to expect, how to check it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tercel.draft import DraftModel
from tercel.draft.acceptance import joint
from tercel.interop.engines import ExportJob, ServingEngine, find
from tercel.interop.proof import Proven


def readme(
    job: ExportJob,
    engine: ServingEngine,
    target: str,
    command: str,
    checks: Sequence[Proven],
    doubts: Sequence[str],
) -> str:
    """Markdown; `target` is what the engine loads as the target, `command` starts it with the folder in its place."""
    model, c, who = job.model, job.model.head.config, engine.title
    name = model.info.target.name if model.info.target is not None else target
    written = ", ".join(map(str, engine.ids(c.feature_layers)))
    meant = ", ".join(map(str, c.feature_layers))
    server, beside_launch = find(engine.run_by), engine.beside_launch(job)
    checked = model.path or "HEAD" if engine.takes_gguf else job.out  # a GGUF draft is not read back as a head
    url, counters = "", ""
    if server.tells_counters:
        url = f" --url http://localhost:{server.port}"
        counters = ", and a running server's counters with what this head should reach"
    parts = [
        f"# EAGLE-3 draft head for {name}, as {who} loads it",
        f"It drafts tokens that `{name}` verifies; the text stays the target's own. Of no use with another model, and "
        f"written for {who} only: engines disagree on what a checkpoint means.",
        f"## Start\n```\n{command}\n```",
        *([] if beside_launch is None else [beside_launch]),
        f"## What to expect\n{_expected(model)}",
        f"## Check\n```\ntercel doctor {shlex.quote(target)} {shlex.quote(str(checked))}{url}\n```\n"
        f"compares template, tokenizer, RoPE, positions and vocabulary{counters}. A wrong reading never shows in the "
        "text, only in how many drafts are accepted.",
        f"## Written as\nLayer ids {written} are {engine.ids_mean}, so the inputs of layers {meant} of "
        f"{c.target_num_layers}. norm_before_residual {_said(c.norm_before_residual)}, norm_before_fc "
        f"{_said(c.norm_before_fc)}, fc_norm {_said(c.fc_norm)}, norm_output {_said(c.norm_output)}.",
        "Read back as the engine's loader reads it, independently of the writer:\n"
        + "\n".join(f"- {check.name}: {check.detail}" for check in checks),
    ]
    if doubts:
        parts.append("Mind:\n" + "\n".join(f"- {doubt}" for doubt in doubts))
    return "\n\n".join(parts) + "\n"


def _said(flag: bool) -> str:
    return "on" if flag else "off"


def _expected(model: DraftModel) -> str:
    held_out = model.info.measured.held_out
    if held_out is None:
        return "Nothing was measured on this head."
    chances = [f"{chance:.0%}" for chance in joint(held_out.alpha)]
    return (
        f"On held-out text a greedy chain of {len(chances)} kept {held_out.tau:.2f} tokens a step (the target's own "
        f"included); its first to last drafted token was accepted in {', '.join(chances)} of the steps. Other prompts "
        "give other numbers, but a server far below these reads the head wrongly or renders prompts unlike training."
    )
