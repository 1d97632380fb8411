"""The MTP modules of a checkpoint draft what the papers' formulas say, and change no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tercel.decode.engine import Engine
from tercel.decode.proposers import MTP, make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft import DraftModel, DraftVocabulary, HeadInfo, load_head, save_head
from tercel.draft.binding import bind
from tercel.draft.inspect import inspect_head
from tercel.draft.kinds import new_head
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.methods.mtp.initial import new_config, take_from_target
from tercel.methods.mtp.module import MtpHead
from tercel.methods.mtp.read import read_mtp
from tercel.target_model.model import Target
from tests.decode.drafts import Watched, tiny_target
from tests.methods.mtp_worlds import Checkpoints, changed, leave_out_modules
from tests.methods.naive_mtp import NaiveMtp

CHAIN, TREE = TreeShape.chain(4), TreeShape(3, 4, 10)
PROMPTS = [(9, 10, 9, 9, 10, 9), (5,), tuple(range(20, 40))]
CASES = [("deepseek_v3", 1, TREE), ("glm4_moe", 3, TREE), ("qwen2", 1, CHAIN)]


def asked() -> list[Request]:
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (12, 7, 9)]
    return [Request(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]


def texts(target: Target, *proposer: object) -> list[tuple[int, ...]]:
    made = proposer[0] if proposer else Vanilla()
    return [result.tokens for result in Engine(target, made, slots=2).generate(asked())]  # type: ignore[arg-type]


def path_to(parents: Sequence[int], tokens: Sequence[int], node: int) -> list[int]:
    """The drafts above a node, from the root's child on."""
    above = []
    while (node := parents[node]) > 0:
        above.insert(0, tokens[node])
    return above


@pytest.mark.parametrize(("arch", "modules", "shape"), CASES, ids=str)
def test_drafts_are_those_of_the_papers(
    checkpoints: Checkpoints, arch: str, modules: int, shape: TreeShape
) -> None:
    path = checkpoints(arch, modules)
    target, naive = Target.load(str(path)), NaiveMtp(path, arch, modules)
    watched = Watched(make_proposer(MTP, target, shape=shape))
    assert texts(target, watched) == texts(target)
    drafts = [
        (text, path_to(p.tree.parent_list, p.tree.token_list, node), p.tree.token_list[node])
        for text, p in watched.seen
        for node in range(1, len(p.tree))
    ]
    assert max(len(above) for _, above, _ in drafts) == shape.depth - 1
    assert len(drafts) > 40
    for text, above, token in drafts[::7]:
        scores = naive.scores(text, above)
        assert scores[token] >= scores.topk(shape.top_k).values[-1] - 1e-3, (text, above)


def test_a_module_of_a_target_that_cannot_verify_is_read_and_its_drafts_refused(checkpoints: Checkpoints) -> None:
    target = Target.load(str(checkpoints("qwen3_next")))
    model = read_mtp(target)
    assert model.head.in_words() == "MTP (1 module, Qwen3NextDecoderLayer)"
    stored = load_file(checkpoints("qwen3_next") / "model.safetensors")
    for ours, theirs in (
        ("eh_proj", "mtp.fc"),
        ("enorm", "mtp.pre_fc_norm_embedding"),
        ("hnorm", "mtp.pre_fc_norm_hidden"),
        ("norm", "mtp.norm"),
        ("block.self_attn.q_proj", "mtp.layers.0.self_attn.q_proj"),
    ):
        assert torch.equal(model.head.state_dict()[f"layers.0.{ours}.weight"], stored[f"{theirs}.weight"])
    with pytest.raises(TercelError, match="cannot verify drafts: its linear_attention layers keep a state"):
        texts(target, make_proposer(MTP, target, shape=CHAIN))


def test_it_is_saved_and_read_again_as_it_was(checkpoints: Checkpoints, tmp_path: Path) -> None:
    target = Target.load(str(checkpoints("glm4_moe", 3)))
    model = read_mtp(target)
    assert not model.head.config.own_embeddings  # they only repeat the target's
    assert not model.head.config.own_output
    save_head(model, tmp_path / "head", dtype=torch.float32)
    again = load_head(tmp_path / "head")
    assert again.head.config == model.head.config
    assert all(torch.equal(t, again.head.state_dict()[name]) for name, t in model.head.state_dict().items())
    drafted = make_proposer(MTP, target, head=bind(again, target), shape=TREE)
    assert texts(target, drafted) == texts(target)
    assert inspect_head(again, dict(again.head.state_dict())).kind.startswith("MTP (3 modules")


def test_a_checkpoint_that_says_it_has_modules_and_has_none(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = changed(checkpoints("glm4_moe", 3), tmp_path / "t", leave_out_modules, num_nextn_predict_layers=1)
    with pytest.raises(TercelError, match=r"announces MTP modules \(num_nextn_predict_layers is 1\), but its files"):
        make_proposer(MTP, Target.load(str(path)), shape=CHAIN)
    with pytest.raises(TercelError, match="llama comes without an MTP module; train one"):
        make_proposer(MTP, tiny_target("llama"), shape=CHAIN)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.layers.2.hnorm.weight"), "lacks layers.0.hnorm.weight"),
        (lambda t: t.pop("model.layers.2.mlp.experts.1.up_proj.weight"), "lacks .*experts.1.up_proj"),
        (lambda t: t.update({"model.layers.2.enorm.weight": torch.ones(5)}), r"layers.0.enorm.weight .* is \[5\]"),
        (lambda t: t["model.layers.2.eh_proj.weight"].fill_(float("nan")), "holds NaN"),
    ],
)
def test_what_is_wrong_with_a_module_is_said(
    checkpoints: Checkpoints, tmp_path: Path, change: Callable[..., object], says: str
) -> None:
    path = changed(checkpoints("glm4_moe", 3), tmp_path / "t", change)
    with pytest.raises(TercelError, match=says):
        read_mtp(Target.load(str(path)))


def test_embeddings_that_are_not_the_targets_stay_its_own(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def another(tensors: dict[str, Tensor]) -> None:
        for name in ("embed_tokens", "shared_head.head"):
            tensors[f"model.layers.2.{name}.weight"] += 1

    target = Target.load(str(changed(checkpoints("glm4_moe", 3), tmp_path / "t", another)))
    head = bind(read_mtp(target), target).head
    assert (head.config.own_embeddings, head.config.own_output) == (True, True)
    assert texts(target, make_proposer(MTP, target, shape=TREE)) == texts(target)


def test_only_classes_of_transformers_are_imported(checkpoints: Checkpoints) -> None:
    config = read_mtp(Target.load(str(checkpoints("qwen2")))).head.config
    assert isinstance(new_head(config), MtpHead)
    for wrong in ("os:system", "transformers.models.qwen2.modeling_qwen2:Gone", "transformers.models.gone:X"):
        with pytest.raises(TercelError, match=r"classes in transformers\.models|installed transformers has no"):
            new_head(replace(config, classes={**config.classes, "layer": wrong}))


@pytest.mark.parametrize("arch", ["gpt_oss", "qwen3_moe"])
def test_a_target_without_modules_lends_its_last_layer(arch: str) -> None:
    target = tiny_target(arch)
    vocabulary = DraftVocabulary(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    head = new_head(new_config(target, len(vocabulary), 2))
    take_from_target(head, target)
    model = bind(DraftModel(head.eval().requires_grad_(False), vocabulary, HeadInfo(None)), target)
    assert texts(target, make_proposer(MTP, target, head=model, shape=TREE)) == texts(target)


def test_a_target_whose_layers_cannot_be_had_alone() -> None:
    with pytest.raises(TercelError, match="GPT2Block takes no cache or no rotations from outside"):
        new_config(tiny_target("gpt2"), 128)
