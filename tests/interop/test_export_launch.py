"""Launch lines: what a shell, a JSON or YAML reader and Python make of them."""

from __future__ import annotations

import ast
import json
import shlex

import pytest
import yaml

from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.interop.engines import find
from tercel.interop.engines.openvino import place_layers, run_chain
from tercel.interop.engines.trtllm import options as written_options

HEAD, TARGET = "/data/my heads/a", "org/target"


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_vllm_drafts_a_chain_with_the_head() -> None:
    words = shlex.split(find("vllm").launch(HEAD, TARGET, TreeShape.chain(5), "float16"))
    assert words[:3] == ["vllm", "serve", TARGET]
    assert option(words, "--dtype") == "float16"
    assert json.loads(option(words, "--speculative-config")) == {
        "method": "eagle3",
        "model": HEAD,
        "num_speculative_tokens": 5,
    }


def test_speculators_folders_are_served_by_themselves() -> None:
    words = shlex.split(find("speculators").launch(HEAD, TARGET, TreeShape.chain(5)))
    assert words[:3] == ["vllm", "serve", HEAD]
    assert json.loads(option(words, "--speculative-config")) == {"num_speculative_tokens": 5}


@pytest.mark.parametrize(("shape", "nodes"), [(TreeShape.chain(4), "5"), (TreeShape(4, 3, 16), "16")])
def test_sglang_takes_chains_and_trees(shape: TreeShape, nodes: str) -> None:
    words = [word for word in shlex.split(find("sglang").launch(HEAD, TARGET, shape)) if word.strip()]
    assert option(words, "--model-path") == TARGET
    assert option(words, "--speculative-algorithm") == "EAGLE3"
    assert option(words, "--speculative-draft-model-path") == HEAD
    assert option(words, "--speculative-num-steps") == str(shape.depth)
    assert option(words, "--speculative-eagle-topk") == str(shape.top_k)
    assert option(words, "--speculative-num-draft-tokens") == nodes


def test_tensorrt_llm_reads_its_options_from_yaml() -> None:
    options = yaml.safe_load(written_options(HEAD, TreeShape.chain(6), (1, 14, 26)))
    assert options == {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "max_draft_len": 6,
            "speculative_model": HEAD,
            "eagle3_layers_to_capture": [1, 14, 26],
        }
    }
    words = shlex.split(find("trtllm").launch(HEAD, TARGET, TreeShape.chain(6)))
    assert words == ["trtllm-serve", TARGET, "--extra_llm_api_options", f"{HEAD}/trtllm.yaml"]


def test_openvino_converts_places_layers_and_runs() -> None:
    text = find("openvino").launch(HEAD, TARGET, TreeShape.chain(4), "float32")
    target, head = (shlex.split(line) for line in text.splitlines()[:2])
    assert option(target, "-m") == TARGET
    assert option(head, "-m") == HEAD
    assert "--trust-remote-code" in head
    assert option(head, "--weight-format") == "fp32"
    for script in (place_layers(f"{HEAD}/openvino.json"), run_chain(TreeShape.chain(4))):
        ast.parse(script)
        assert script in text


def test_llamacpp_takes_two_files() -> None:
    words = shlex.split(find("llamacpp").launch("a/draft.gguf", "b/target.gguf", TreeShape.chain(4)))
    assert words == shlex.split(
        "llama-server -m b/target.gguf -md a/draft.gguf --spec-type draft-eagle3 --spec-draft-n-max 4"
    )


def test_other_engines_and_shapes_are_refused() -> None:
    with pytest.raises(TercelError, match="no engine 'tgi'"):
        find("tgi")
    for wrong in ((0, 1, 2), (1, 0, 2), (1, 1, 1), (10**9, 1, 2), (1, 10**9, 2), (1, 1, 10**9)):
        with pytest.raises(TercelError, match="top-k 1 to 64, depth 1 to 128 and 2 to 1024 nodes, not"):
            TreeShape(*wrong)
