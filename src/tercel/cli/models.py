"""Targets, heads and proposers as the options ask for them, with a bar while something is fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercel.cli.consoles import fetching_bar, say, working
from tercel.cli.options import DraftKind, DraftOptions, ModelOptions
from tercel.errors import TercelError

if TYPE_CHECKING:
    import torch

    from tercel.decode.generation_config import Asked
    from tercel.decode.proposer import Proposer
    from tercel.decode.sampling import SamplingParams
    from tercel.draft import DraftModel
    from tercel.draft.shape import TreeShape
    from tercel.target_model.model import Target


def open_target(name: str, options: ModelOptions, *, exact: bool = False) -> Target:
    """Load the target; `exact` asks for float32 where no `--dtype` is given.

    Raises `TercelError` if it cannot be found or loaded, if the device is not there, and for a template argument that
    its chat template does not read.
    """
    from tercel.chat.arguments import parse_arguments
    from tercel.target_model.model import Target
    from tercel.target_model.sources import check_device, parse_dtype, resolve

    arguments = parse_arguments(options.template_arg or ())
    device = check_device(pick_device() if options.device == "auto" else options.device)
    if options.dtype is not None:
        dtype = parse_dtype(options.dtype.value)
    else:
        dtype = parse_dtype("float32" if exact else fast_dtype(device))
    with fetching_bar() as on_bytes:
        resolve(name, on_bytes, options.accept_licence)  # fills the cache, so that loading need not ask again
    with working(f"loading {name}"):
        return Target.load(
            name,
            dtype=dtype,
            device=str(device),
            trust_remote_code=options.trust_remote_code,
            template_arguments=arguments,
        )


def open_head(name: str | None, target: Target, options: DraftOptions) -> DraftModel:
    """Load a head in the target's precision and check that it belongs to the target.

    Raises `TercelError` if there is no such head, it is damaged, or it is another target's.
    """
    from tercel.decode.compat import load_draft

    return load_draft(name, target, force=options.force_head, layer_ids=options.layer_ids.meaning)


def tree_shape(options: DraftOptions, device: torch.device) -> TreeShape:
    """The shape of the draft that the options ask for. Raises `TercelError` for `--draft none`."""
    from tercel.draft.shape import CHAIN_DEPTH, TreeShape

    if options.draft is DraftKind.none:
        raise TercelError("--draft none drafts nothing, so there is nothing to compare; give tree or chain")
    if options.draft is DraftKind.chain:
        return TreeShape.chain(options.draft_depth or CHAIN_DEPTH)
    usual = TreeShape.for_device(device)
    return TreeShape(
        top_k=options.draft_top_k or usual.top_k,
        depth=options.draft_depth or usual.depth,
        nodes=options.draft_nodes or usual.nodes,
    )


def open_proposer(head: str | None, target: Target, options: DraftOptions) -> Proposer:
    """EAGLE-3 with the head, or plain decoding for `--draft none` (which needs no head)."""
    from tercel.decode.eagle3 import Eagle3
    from tercel.decode.vanilla import Vanilla

    if options.draft is DraftKind.none:
        return Vanilla()
    return Eagle3(open_head(head, target, options), target, tree_shape(options, target.device))


def pick_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def fast_dtype(device: torch.device) -> str:
    """bfloat16 on accelerators and on CPUs with instructions for it; elsewhere it is emulated and slow."""
    import torch

    if device.type != "cpu":
        return "bfloat16"
    able = torch.cpu.get_capabilities()
    return "bfloat16" if able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16") else "float32"


def open_sampling(asked: Asked, target: Target) -> SamplingParams:
    """What is asked for and what the target's generation config asks for; says what came of that.

    Raises `TercelError` for a config that means nothing.
    """
    adopted = asked.of(target)
    for note in adopted.notes:
        say(f"note: {note}")
    return adopted.params


def say_where_drafts_ended(*proposers: Proposer) -> None:
    """A line if a head had too few positions for an answer."""
    from tercel.decode.eagle3 import Eagle3

    for proposer in proposers:
        if isinstance(proposer, Eagle3) and proposer.limited:
            say(f"note: the draft head has {proposer.positions:,} positions; the text beyond them has no drafts")
            return
