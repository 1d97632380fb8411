"""Targets, heads and proposers as the options ask for them, with a bar while something is fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercel.cli.consoles import counting_bar, fetching_bar, say, working
from tercel.cli.options import DecodingModelOptions, DraftOptions, ModelOptions

if TYPE_CHECKING:
    import torch

    from tercel.decode.generation_config import Asked
    from tercel.decode.proposer import Proposer
    from tercel.decode.sampling import SamplingParams
    from tercel.draft import DraftModel
    from tercel.target_model.model import Target


def open_target(name: str, options: ModelOptions, *, exact: bool = False, sharding: str = "none") -> Target:
    """Load the target; `exact` asks for float32 where no `--dtype` is given. What computes it is said if that is not
    what was asked for. sharding: as of `Target.load`.

    Raises `TercelError` if it cannot be found or loaded, if the device or the backend is not there, and for a template
    argument that its chat template does not read.
    """
    from tercel.chat.arguments import parse_arguments
    from tercel.target_model.backend_names import OPENVINO
    from tercel.target_model.backends import with_backend
    from tercel.target_model.model import Target
    from tercel.target_model.sources import check_device, parse_dtype, resolve

    decoding = options if isinstance(options, DecodingModelOptions) else None
    arguments = parse_arguments(options.template_arg or ())
    device = check_device(given_device(options))
    if options.dtype is not None:
        dtype = parse_dtype(options.dtype.value)
    else:
        dtype = parse_dtype("float32" if exact else fast_dtype(device))
    with fetching_bar() as on_bytes:
        resolve(name, on_bytes, options.accept_licence)  # fills the cache, so that loading need not ask again
    with working(f"loading {name}"):
        target = Target.load(
            name,
            dtype=dtype,
            device=str(device),
            trust_remote_code=options.trust_remote_code,
            template_arguments=arguments,
            sharding=sharding,
            weights=None if decoding is None or decoding.weights is None else decoding.weights.value,
        )
        if decoding is None:
            return target
        target = with_backend(target, decoding.backend.value, say=lambda note: say(f"note: {note}"))
    if target.weights is not None:
        gain = "" if target.backend == OPENVINO else f"; {target.backend} computes it no faster"
        say(f"note: with {target.weights} weights {name} is another model, whose text may differ from its own{gain}")
    return target


def open_head(name: str | None, target: Target, options: DraftOptions) -> DraftModel:
    """Load a head in the target's precision and check that it belongs to the target.

    Raises `TercelError` if there is no such head, it is damaged, or it is another target's.
    """
    from tercel.decode.compat import load_draft
    from tercel.draft.misfits import misfits

    head = load_draft(name, target, force=options.force_head, layer_ids=options.layer_ids.meaning)
    for misfit in misfits(head, target):
        if misfit.severity == "note":
            say(f"note: {misfit}")
    return head


def open_proposer(head: str | None, target: Target, options: DraftOptions, slots: int = 1) -> Proposer:
    """What `--draft` asks for, as large as `--tree` asks for; the head is opened if that needs one. slots: rows that it
    will draft for at a time, at most.

    Raises `TercelError` as `open_head`, and if a part that it needs is missing.
    """
    from tercel.decode.proposers import proposer_kind

    options.require_use_of_model(options.method)
    needed = proposer_kind(options.method).takes_head(head is not None)
    draft = open_head(head, target, options) if needed else None
    return ready_proposer(options.method, target, draft, options, slots, open_draft_model(target, options))


def open_draft_model(target: Target, options: DraftOptions) -> Target | None:
    """What `--draft-model` names, computed as the target is; None if nothing is named.

    Raises `TercelError` if it cannot be found or loaded.
    """
    if options.draft_model is None:
        return None
    from tercel.target_model.backend_names import OPENVINO, TORCH
    from tercel.target_model.backends import with_backend
    from tercel.target_model.model import Target
    from tercel.target_model.sources import resolve

    name, backend = options.draft_model, TORCH if target.backend == TORCH else OPENVINO
    with fetching_bar() as on_bytes:
        resolve(name, on_bytes)
    with working(f"loading {name}"):
        # which bits its drafts have changes no text
        model = Target.load(name, dtype=target.dtype, device=str(target.device), same_bits=False)
        return with_backend(model, backend, say=lambda note: say(f"note: {note}"))


def ready_proposer(
    name: str,
    target: Target,
    head: DraftModel | None,
    options: DraftOptions,
    slots: int = 1,
    model: Target | None = None,
) -> Proposer:
    """The proposer of that name, with a bar while the machine's costs are measured that size its drafts.

    Raises `TercelError` if a part that it needs is missing.
    """
    from tercel.decode.proposers import make_proposer

    with counting_bar("measuring what steps cost") as bar:
        return make_proposer(
            name,
            target,
            head=head,
            model=model,
            shape=options.shape,
            slots=slots,
            progress=lambda done, total: bar(done, total, ""),
        )


def given_device(options: ModelOptions) -> str:
    return pick_device() if options.device == "auto" else options.device


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


def say_notes(*proposers: Proposer) -> None:
    """What they have to say of the answers, a line each; and who changed them."""
    for proposer in proposers:
        if proposer.lossy is not None:
            rule = proposer.lossy.title
            say(f"note: {proposer.name} is LOSSY: {rule} changes the text, which is not the model's own")
    for note in dict.fromkeys(note for proposer in proposers for note in proposer.notes()):
        say(f"note: {note}")
