"""What listed layer ids mean: outputs or inputs, told by pattern, place and maker, and doubted where both may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercel.draft.config import engine_default_layers
from tercel.draft.misfits import misfits
from tercel.errors import TercelError
from tercel.interop.formats.layer_ids import Listed, as_inputs, default_pattern, settle
from tercel.interop.formats.notes import Notes
from tercel.interop.formats.read import read_head
from tests.decode.drafts import tiny_target
from tests.draft.heads_for_tests import tiny_draft
from tests.interop.foreign import (
    LIST,
    edit,
    write_angelslim,
    write_modelopt,
    write_sglang,
    write_specforge,
    write_speculators,
)

DEPTHS = st.integers(8, 200)
IDS = st.lists(st.integers(0, 60), min_size=1, max_size=6, unique=True).map(sorted)


@given(IDS)
def test_outputs_and_inputs_are_one_apart(ids):
    inputs = as_inputs(ids, "output")
    assert [i - 1 for i in inputs] == ids
    assert as_inputs(inputs, "input") == inputs


@given(DEPTHS)
def test_the_default_is_recognised_in_both_meanings_with_its_depth(depth):
    inputs = engine_default_layers(depth)
    outputs = (1, depth // 2 - 1, depth - 4)  # modelopt hf_eagle.py:58-63, SpecForge model_providers.py:204
    assert default_pattern(inputs) == ("input", depth)
    assert default_pattern(outputs) == ("output", depth)
    assert as_inputs(outputs, "output") == inputs


@given(IDS, st.sampled_from(["input", "output"]), st.booleans(), st.none() | DEPTHS)
def test_settling_gives_one_of_the_two_readings_and_says_which(ids, habit, sure, depth):
    notes = Notes()
    layers = settle(Listed(tuple(ids), "a list", habit, "so meant", sure), depth, None, notes)
    assert layers in (tuple(ids), tuple(i + 1 for i in ids))
    (told,) = notes.conventions
    assert ("outputs" in told.value) == (layers != tuple(ids))
    if default_pattern(ids) is None and not sure and not (habit == "output" and ids[0] == 1):
        assert any("--probe" in doubt for doubt in notes.doubts)


@given(IDS, st.sampled_from(["input", "output"]), st.sampled_from(["input", "output"]), st.booleans())
def test_what_the_user_says_wins(ids, habit, said, sure):
    notes = Notes()
    layers = settle(Listed(tuple(ids), "a list", habit, "so meant", sure), None, said, notes)
    assert layers == as_inputs(ids, said)
    assert notes.doubts == []


def layers(folder, **options):
    return read_head(folder, **options).head.config.feature_layers


def doubts(folder, **options):
    return [w for w in read_head(folder, **options).warnings if "layer" in w or "lists" in w]


def test_specforge_lists_outputs(tmp_path):
    # SpecForge hands its list to SGLang's set_eagle3_layers_to_capture (capture.py:86), which adds 1 (llama.py:941)
    folder = write_specforge(tiny_draft(), tmp_path / "head", eagle_config={LIST: [1, 3, 4]})
    assert layers(folder) == (2, 4, 5)
    assert doubts(folder, num_layers=8) == []


def test_the_same_place_with_the_usual_inputs_is_taken_as_inputs(tmp_path):
    # vLLM takes the list raw (eagle3_utils.py:106), so folders made for it hold inputs
    folder = write_specforge(tiny_draft(), tmp_path / "head", eagle_config={LIST: [2, 15, 27]})
    assert layers(folder) == (2, 15, 27)
    assert doubts(folder, num_layers=30) == []


@pytest.mark.parametrize("ids", [[2, 3, 6], [0, 3, 6]])
def test_another_list_in_eagle_config_is_doubted(tmp_path, ids):
    folder = write_specforge(tiny_draft(), tmp_path / "head", eagle_config={LIST: ids})
    (doubt,) = doubts(folder, num_layers=8)
    assert f"eagle_config.{LIST} lists {', '.join(map(str, ids))}, taken as outputs (as SpecForge writes" in doubt
    assert "others mean inputs by the same list; settle it with `tercel inspect HEAD --target TARGET --probe`" in doubt
    assert layers(folder, num_layers=8) == tuple(i + 1 for i in ids)
    assert layers(folder, num_layers=8, layer_ids="input") == tuple(ids)
    assert doubts(folder, num_layers=8, layer_ids="input") == []


def test_a_first_id_of_1_means_outputs(tmp_path):
    # SGLang's rule for the models that know both conventions (deepseek_v2.py:3470, glm4_moe_lite.py:817)
    folder = write_specforge(tiny_draft(), tmp_path / "head", eagle_config={LIST: [1, 2, 6]})
    assert layers(folder, num_layers=8) == (2, 3, 7)
    assert doubts(folder, num_layers=8) == []


def test_modelopt_hooks_outputs(tmp_path):
    # a forward hook on layer i sees its output (hf_eagle.py:402-406)
    folder = write_modelopt(tiny_draft(feature_layers=(3, 4, 6)), tmp_path / "head")
    assert layers(folder, num_layers=8) == (3, 4, 6)
    (doubt,) = doubts(folder, num_layers=8)
    assert "as ModelOpt means them" in doubt


def test_speculators_lists_inputs(tmp_path):
    # its own default is [2, L//2, L-3] (models/utils.py:111), and vLLM takes the list raw (algos.py:47)
    folder = write_speculators(tiny_draft(own_embeddings=True, feature_layers=(1, 2, 6)), tmp_path / "head")
    assert layers(folder, num_layers=8) == (1, 2, 6)
    assert doubts(folder, num_layers=8) == []


def test_speculators_with_the_usual_outputs_is_doubted(tmp_path):
    # its converter takes lists of other formats unchanged; its own example is [1, 23, 44] (convert/entrypoints.py:86)
    folder = write_speculators(tiny_draft(own_embeddings=True), tmp_path / "head", **{LIST: [1, 23, 44]})
    assert layers(folder, num_layers=48) == (1, 23, 44)
    (doubt,) = doubts(folder, num_layers=48)
    assert "as outputs they would be the usual layers of a target of 48" in doubt
    assert "carried over unchanged" in doubt


def test_angelslim_lists_outputs_where_engines_do_not_look(tmp_path):
    # hidden_states[id + 1] (target_model_wrapper.py, _extract_auxiliary_hidden_states)
    folder = write_angelslim(tiny_draft(feature_layers=(3, 4, 6)), tmp_path / "head")
    assert layers(folder, num_layers=8) == (3, 4, 6)
    (doubt,) = doubts(folder, num_layers=8)
    assert "aux_hidden_states_layer_ids, which vLLM and SGLang do not read" in doubt


def test_a_plain_list_at_the_top_is_taken_as_vllm_does(tmp_path):
    folder = write_sglang(tiny_draft(), tmp_path / "head", **{LIST: [2, 3, 6]})
    assert layers(folder, num_layers=8) == (2, 3, 6)
    (doubt,) = doubts(folder, num_layers=8)
    assert "taken as inputs (as vLLM and llama.cpp read them there" in doubt


def test_two_lists_one_apart_agree(tmp_path):
    folder = write_sglang(tiny_draft(), tmp_path / "head", **{LIST: [2, 3, 6], "eagle_config": {LIST: [1, 2, 5]}})
    assert layers(folder, num_layers=8) == (2, 3, 6)
    assert doubts(folder, num_layers=8) == []


def test_two_equal_lists_are_doubted(tmp_path):
    folder = write_sglang(tiny_draft(), tmp_path / "head", **{LIST: [2, 3, 6], "eagle_config": {LIST: [2, 3, 6]}})
    assert layers(folder, num_layers=8) == (2, 3, 6)
    assert len(doubts(folder, num_layers=8)) == 1


def test_the_default_of_another_depth_is_doubted(tmp_path):
    folder = write_specforge(tiny_draft(), tmp_path / "head", eagle_config={LIST: [1, 14, 26]})
    (doubt,) = doubts(folder, num_layers=32)
    assert "the default of a target of 30 layers, but this one has 32: is it the head of another target?" in doubt


def test_a_list_that_does_not_ascend_keeps_its_order_and_is_doubted(tmp_path):
    folder = write_speculators(tiny_draft(own_embeddings=True), tmp_path / "head", **{LIST: [5, 2, 4]})
    assert layers(folder, num_layers=8) == (5, 2, 4)
    (doubt,) = doubts(folder, num_layers=8)
    assert "does not go from low to high" in doubt


@pytest.mark.parametrize("empty", [None, []])
def test_an_empty_list_means_the_default(tmp_path, empty):
    folder = write_speculators(tiny_draft(own_embeddings=True), tmp_path / "head")
    edit(folder, lambda config: config.update({LIST: empty}))
    assert layers(folder, num_layers=8) == (2, 4, 5)


WRONG = [
    ({LIST: [2, 4]}, r"lists 2 layers, but fc.weight in .* takes 48 = 3 x 16 columns"),
    ({LIST: [2, 2, 4]}, "lists a layer twice"),
    ({LIST: [2, -1, 4]}, "must be a list of layer numbers"),
    ({LIST: [2, True, 4]}, "must be a list of layer numbers"),
    ({LIST: "2,4,5"}, "must be a list of layer numbers"),
    (
        {LIST: [2, 4, 6], "eagle_config": {LIST: [2, 4, 5]}},
        "lists layers 2, 4, 6 at the top level but 2, 4, 5 in eagle_config; remove the list that is wrong",
    ),
    ({"num_aux_hidden_states": 5}, "num_aux_hidden_states 5, but fc.weight in .* takes 48 = 3 x 16 columns"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_lists_that_cannot_be(tmp_path, changes, words):
    folder = write_sglang(tiny_draft(), tmp_path / "head", **changes)
    with pytest.raises(TercelError, match=words) as caught:
        read_head(folder, num_layers=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"eagle_config": {LIST: [3, 5, 7]}}, ", or say --layer-ids input if that is what its list means"),
        ({"eagle_config": {LIST: [3, 5, 8]}}, ""),  # no layer in either meaning
        ({"eagle_config": None, LIST: [3, 5, 8]}, ""),  # inputs already
    ],
)
def test_a_list_out_of_range_is_read_and_misfits(tmp_path, changes, hint):
    """Whoever reads it: what the list means is one question, and whether the target has such layers another."""
    folder, target = write_specforge(tiny_draft(), tmp_path / "head", **changes), tiny_target("llama")
    found = [str(misfit) for misfit in misfits(read_head(folder, num_layers=8), target) if misfit.what != "sizes"]
    beyond = 9 if changes["eagle_config"] == {LIST: [3, 5, 8]} else 8
    said = f"reads the input of layer {beyond}, but llama has layers 0..7; give this head's own target"
    assert found == [f"{folder} {said}{hint}"]
    if hint:
        assert layers(folder, num_layers=8, layer_ids="input") == (3, 5, 7)


def test_fc_for_another_number_of_layers_needs_a_list(tmp_path):
    folder = write_sglang(tiny_draft(feature_layers=(1, 2, 3, 4, 5)), tmp_path / "head")
    with pytest.raises(TercelError, match=r"takes 80 = 5 x 16 columns, but .* lists no layers, which means three"):
        read_head(folder)


def test_no_list_leaves_nothing_to_say_about_it(tmp_path):
    with pytest.raises(TercelError, match="lists no layers, so there is nothing to take as outputs"):
        read_head(write_sglang(tiny_draft(), tmp_path / "head"), layer_ids="output")
