"""What a head's tensors tell: vocabulary, token embeddings, precision, and quantisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.doctor.findings import Finding
from tercel.draft import DraftModel
from tercel.interop.formats.head_files import HeadFiles
from tercel.target_model.protocol import TargetModel

LOW_COVERAGE = 0.9
FLOAT16_MAX = torch.finfo(torch.float16).max
HEADROOM = 4  # a short text does not show the largest features
_SAMPLE = 512  # tokens whose embeddings are compared
_EQUAL, _ALIKE = 0.999, 0.2  # mean cosine, or correlation of similarities


def vocabulary_findings(model: DraftModel, target: TargetModel) -> Iterator[Finding]:
    """The draft vocabulary: whether answers can be drafted to their end, and how much of them."""
    check, vocabulary, size = "draft vocabulary", model.vocabulary, len(model.vocabulary)
    if not vocabulary.pruned:
        yield Finding(check, "ok", f"all {size} tokens can be drafted")
        return
    if torch.equal(vocabulary.ids, torch.arange(size)):
        yield Finding(
            check,
            "warning",
            f"the map names simply the first {size} tokens, which is what a lost d2t looks like",
            "compare with the head's own d2t; export again if it got lost",
        )
    known = set(vocabulary.ids.tolist())
    missing = sorted(set(target.eos_token_ids) - known)
    if missing:
        every = len(missing) == len(target.eos_token_ids)
        yield Finding(
            check,
            "warning" if every else "note",
            f"token {missing[0]}, which ends {'an answer' if every else 'some answers'}, cannot be drafted",
            "train with a vocabulary that holds the end of turn; until then the last draft of an answer is lost",
        )
    coverage = model.info.training.draft_vocabulary_coverage
    if coverage is not None:
        low = coverage < LOW_COVERAGE
        yield Finding(
            check,
            "warning" if low else "ok",
            f"{size} tokens, {coverage:.1%} of the text it learned from",
            "train with a larger --draft-vocab" if low else "",
        )
    elif not missing:
        yield Finding(check, "ok", f"{size} of {vocabulary.target_size} tokens can be drafted, ends of answers too")


def embedding_findings(model: DraftModel, target: TargetModel) -> Iterator[Finding]:
    """Token embeddings that the head brings along: vLLM takes them in place of the target's."""
    check, config = "embeddings", model.head.config
    if not config.own_embeddings:
        yield Finding(check, "ok", "the head shares the target's")
        return
    if config.vocab_size != target.vocab_size:
        return  # the sizes' own check tells
    ids = torch.linspace(0, config.vocab_size - 1, min(_SAMPLE, config.vocab_size)).long().unique().to(target.device)
    own = model.eagle3.embed_tokens(ids.to(model.head.device)).detach().float().cpu()
    theirs = target.embed(ids).float().cpu()
    used = theirs.abs().sum(-1) > 0  # a padding token's may be zero
    own, theirs, same_width = own[used], theirs[used], own.shape == theirs.shape
    likeness = float(F.cosine_similarity(own, theirs).mean()) if same_width else _structure(own, theirs)
    if likeness >= _EQUAL and same_width:
        yield Finding(check, "ok", "the head brings its own, equal to the target's")
    elif likeness >= _ALIKE:
        yield Finding(check, "note", f"the head brings its own, alike to the target's ({likeness:.2f})")
    else:
        yield Finding(
            check,
            "problem",
            f"the head's own embed_tokens have nothing in common with the target's ({likeness:.2f}): they look random",
            "remove embed_tokens from the file so that engines share the target's, or fetch the head again"
            if same_width
            else "fetch the head again; one of another width than its target cannot do without its own",
        )


def _structure(own: Tensor, theirs: Tensor) -> float:
    """How alike two sets of vectors of different width are: correlation of their cosine similarities."""
    pairs = torch.triu_indices(len(own), len(own), 1)
    values = torch.stack([(F.normalize(x) @ F.normalize(x).T)[pairs[0], pairs[1]] for x in (own, theirs)])
    return float(torch.nan_to_num(torch.corrcoef(values)[0, 1]))


@torch.no_grad()
def precision_findings(
    model: DraftModel, target: TargetModel, files: HeadFiles, prompt: list[int]
) -> Iterator[Finding]:
    """float16, which overflows where the target's residual stream is large; `prompt` is a short text to look at it."""
    check = "precision"
    halves = []
    if "F16" in files.dtypes.values() or "float16" in _declared(files):
        halves.append("the head's file")
    if target.config.dtype == torch.float16 or target.dtype == torch.float16:
        halves.append("the target")
    if not halves:
        kinds = sorted({kind for kind in files.dtypes.values() if kind in ("BF16", "F32")}) or ["not float16"]
        yield Finding(check, "ok", f"the head's file is {' and '.join(kinds)}")
        return
    largest = _largest_feature(target, prompt)
    if largest * HEADROOM > FLOAT16_MAX:
        yield Finding(
            check,
            "problem",
            f"{' and '.join(halves)} is float16, which ends at {FLOAT16_MAX:,.0f}, and the target's features reach "
            f"{largest:,.0f} on a few tokens",
            "serve in bfloat16 (--dtype bfloat16), and save the head so",
        )
    else:
        yield Finding(
            check,
            "warning",
            f"{' and '.join(halves)} is float16 (largest feature on a few tokens: {largest:,.1f})",
            "bfloat16 cannot overflow; watch for answers of NaN, which look like exclamation marks",
        )


def _declared(files: HeadFiles) -> set[str]:
    return {str(v) for name in ("torch_dtype", "dtype") for v in files.settings(name).values()}


def _largest_feature(target: TargetModel, prompt: list[int]) -> float:
    """Largest number in the residual stream entering any layer."""
    layers = target.encode(torch.tensor([prompt], device=target.device), range(target.num_layers)).layers
    return max(float(layer.float().abs().max()) for layer in layers)


def quantisation_findings(target: TargetModel, files: HeadFiles) -> Iterator[Finding]:
    """Quantised weights: of the target, and wrongly inherited by the head's settings."""
    for name in ("quantization_config", "compression_config"):
        if any(value for value in files.settings(name).values()):
            yield Finding(
                "quantisation",
                "problem",
                f"the head's config.json has a {name}, inherited from its target, but its tensors are not quantised",
                f"remove {name} from the head's config.json, or export the head again",
            )
            break
    settings = target.config.to_dict().get("quantization_config")
    if settings:
        method = settings.get("quant_method", "quantised") if isinstance(settings, dict) else "quantised"
        yield Finding(
            "quantised target",
            "warning",
            f"the target is quantised ({method}), so its features are not quite those of the full weights",
            "measure acceptance on it; train the head on the quantised target's features if it falls",
        )
    elif target.source.kind in ("gguf", "alias"):
        yield Finding(
            "quantised target",
            "note",
            f"{target.source.name} was dequantised from a GGUF file",
            "serve exactly these weights: those that it was quantised from give other features",
        )
    else:
        yield Finding("quantised target", "ok", "the target is not quantised")
