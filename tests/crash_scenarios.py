"""What is killed: training, and everything else that writes where a user says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from tercel.chat import regenerate
from tercel.draft import DraftModel, load_head, save_head
from tercel.errors import TercelError
from tercel.file_set import CONFIG, MANIFEST, RECORD, WEIGHTS
from tercel.interop.hub import save_pretrained
from tercel.interop.proof import prove
from tercel.measure.record import record
from tercel.train.feature_store import MANIFEST as FEATURES
from tercel.train.feature_store import FeatureStore
from tercel.train.make_features import make_features
from tercel.train.run_folder import RunFolder
from tests.chat.echo import SETTINGS, TOKENIZER, Echo, asks, lines
from tests.cli.running import everything
from tests.crashes import Scenario
from tests.draft.heads_for_tests import tiny_draft, tiny_head
from tests.interop.export_worlds import draft, export
from tests.measure.test_record import entry
from tests.train.test_loop import CHATS, SMALL, run, same
from tests.train.worlds import target_of

SHORT = replace(SMALL, epochs=1, eval_every=1)
OTHER = replace(SHORT, seed=1)
MINE = {"run/notes.txt": b"years of work", "run/last/notes.txt": b"more"}


def names(folder: Path) -> set[str]:
    return set(everything(folder))


def lay_beside(place: Path) -> None:
    """Files of the user's, where a run already is."""
    if RunFolder(place / "run").marker.exists():
        for name, data in MINE.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(data)


def best_head_is_there(place: Path) -> None:
    folder = RunFolder(place / "run")
    if folder.metrics.exists() and '"eval"' in folder.metrics.read_text():
        load_head(folder.out)
    lay_beside(place)


def run_is_whole(place: Path, whole: Path) -> None:
    """The same run, no leftovers, and the user's files as they were."""
    same(place / "run", whole / "run")
    now, then = everything(place), everything(whole)
    laid = {name for name in MINE if name in now}
    assert now.keys() - laid == then.keys() - MINE.keys()
    assert all(now[name] == MINE[name] for name in laid)
    for name in then:
        if Path(name).name in (CONFIG, WEIGHTS, RECORD, "README.md"):
            assert now[name] == then[name], name


def train_anew(place: Path) -> object:
    return run(place / "run", OTHER, overwrite=True)


def a_run_and_files_beside(place: Path) -> None:
    run(place / "run", SHORT, stop_after=2)
    lay_beside(place)


def head_of(seed: int, **flags: bool) -> DraftModel:
    model = tiny_draft(**flags)
    return replace(model, head=tiny_head(model.eagle3.config, seed))


OLD, NEW, OTHER_KIND = head_of(1), head_of(2), head_of(3, norm_output=True)


def a_head_and_a_thesis(place: Path) -> None:
    save_pretrained(OLD, place / "head")
    (place / "head" / "thesis.txt").write_text("mine")


def is_head(folder: Path, model: DraftModel) -> bool:
    read = load_head(folder)
    same_weights = all(
        torch.equal(a, b.to(torch.bfloat16).float())
        for a, b in zip(read.head.state_dict().values(), model.head.state_dict().values(), strict=True)
    )
    return read.head.config == model.head.config and same_weights


def old_or_new(place: Path) -> None:
    assert is_head(place / "head", OLD) or is_head(place / "head", NEW)
    assert (place / "head" / "thesis.txt").read_text() == "mine"


def old_or_new_or_none(place: Path) -> None:
    """Never weights of one beside the description of the other."""
    if (place / "head" / RECORD).exists():
        assert is_head(place / "head", OLD) or is_head(place / "head", OTHER_KIND)


def saved_as(place: Path, whole: Path) -> None:
    assert everything(place) == everything(whole)


def an_export(place: Path) -> None:
    export(draft(norm_before_fc=True), "trtllm", place / "out")


def either_export(place: Path) -> None:
    """As the engine reads it, one or the other; or without a config nothing that an engine would load."""
    if (place / "out" / CONFIG).exists() and (place / "out" / WEIGHTS).exists():
        try:
            prove(draft(), "sglang", place / "out", "llama")
        except TercelError:
            prove(draft(norm_before_fc=True), "trtllm", place / "out", "llama")


def exported_as(place: Path, whole: Path) -> None:
    """But for what names the place: the card, and with it the manifest."""
    mine, theirs = (everything(p / "out") for p in (place, whole))
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if mine[name] != theirs[name] and name not in ("README.md", MANIFEST)] == []


def export_into_the_free(place: Path) -> None:
    try:
        export(draft(), "vllm", place / "out")
    except TercelError as error:  # killed when all was done
        if "is taken" not in str(error):
            raise


def no_half_export(place: Path) -> None:
    if (place / "out" / CONFIG).exists():
        prove(draft(), "vllm", place / "out", "llama")


def answer(place: Path) -> None:
    prompts = [asks(f"c{i}", f"a {i}", f"b é {i}") for i in range(4)]
    try:
        regenerate(prompts, Echo(0), place / "out.jsonl", tokenizer=TOKENIZER, settings=SETTINGS, in_flight=2)
    except TercelError as error:  # killed when all was done
        if "exists already" not in str(error):
            raise


def answers_are_whole(place: Path) -> None:
    if (place / "out.jsonl").exists():
        assert len(lines(place / "out.jsonl")) == 4


def all_answers(place: Path, whole: Path) -> None:
    assert names(place) == names(whole) == {"out.jsonl", "out.jsonl.settings.json"}
    mine, theirs = (sorted(lines(p / "out.jsonl"), key=lambda row: row["id"]) for p in (place, whole))
    assert mine == theirs


def result_is_there(place: Path, whole: Path) -> None:
    assert everything(place) == everything(whole)
    assert json.loads((place / "head" / RECORD).read_text())["measured"]["decoding"] == [entry().to_json()]


def make(place: Path) -> None:
    target, settings = target_of(dtype=torch.bfloat16), {"max_length": SHORT.max_length}
    make_features(target, CHATS, SHORT.feature_layers, place / "features", **settings)


def features_are_whole(place: Path) -> None:
    if (place / "features" / FEATURES).exists():
        store = FeatureStore(place / "features")
        assert store.damaged == []
        for chat in CHATS:
            if chat in store:
                store.read(chat, torch.bfloat16)


def all_features(place: Path, whole: Path) -> None:
    assert everything(place) == everything(whole)


SCENARIOS = {
    "train": Scenario(
        lambda place: None,
        lambda place: run(place / "run", SHORT),
        best_head_is_there,
        run_is_whole,
    ),
    "train --overwrite": Scenario(a_run_and_files_beside, train_anew, lay_beside, run_is_whole),
    "save": Scenario(a_head_and_a_thesis, lambda place: save_pretrained(NEW, place / "head"), old_or_new, saved_as),
    "save another kind": Scenario(
        a_head_and_a_thesis, lambda place: save_pretrained(OTHER_KIND, place / "head"), old_or_new_or_none, saved_as
    ),
    "export": Scenario(lambda place: None, export_into_the_free, no_half_export, exported_as),
    "export --overwrite": Scenario(
        an_export,
        lambda place: export(draft(), "sglang", place / "out", overwrite=True),
        either_export,
        exported_as,
    ),
    "bench --record": Scenario(
        lambda place: save_head(OLD, place / "head", card="# Mine\n"),
        lambda place: record(load_head(place / "head"), entry()),
        lambda place: load_head(place / "head"),
        result_is_there,
    ),
    "features": Scenario(lambda place: None, make, features_are_whole, all_features),
    "regenerate": Scenario(lambda place: None, answer, answers_are_whole, all_answers),
}
