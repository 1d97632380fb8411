"""Features in files: as the target gave them, in 16 and in 8 bits; made on after a stop, refused where they misfit."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercel.chat import TokenizedChat
from tercel.errors import TercelError
from tercel.target_model.protocol import TargetModel
from tercel.train import make_features as making
from tercel.train.encoding import Encoded
from tercel.train.feature_store import FeatureStore, key_of, shard_file
from tercel.train.make_features import FeaturePlan, make_features
from tercel.train.packing import PACKINGS
from tests.train.test_loop import CHATS, SMALL, run, same
from tests.train.worlds import LAYERS, chat, random_chat, target_of

BF16 = torch.bfloat16


def made(out: Path, chats=CHATS, **more) -> FeaturePlan:
    given = {"max_length": SMALL.max_length, **more}
    return make_features(given.pop("target", target_of(dtype=BF16)), chats, given.pop("layers", LAYERS), out, **given)


def shards(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in out.glob("*.safetensors")}


def read_all(store: FeatureStore) -> None:
    for one in CHATS:
        store.read(one, BF16)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "SHARD_BYTES", 20_000)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("store", PACKINGS)
def test_what_the_target_gave_comes_back(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gave: dict[bytes, Encoded] = {}
    encode = making._encode

    def noted(target: TargetModel, layers: Sequence[int], chats: Sequence[TokenizedChat]) -> list[Encoded]:
        encoded = encode(target, layers, chats)
        gave.update(zip(map(key_of, chats), encoded, strict=True))
        return encoded

    monkeypatch.setattr(making, "_encode", noted)
    plan = made(tmp_path / "f", store=store)
    assert (plan.conversations, plan.tokens) == (len(CHATS), sum(map(len, CHATS)))
    files = list((tmp_path / "f").glob("*.safetensors"))
    assert len(files) > 1
    stored = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    assert stored == plan.bytes  # the forecast
    kept = FeatureStore(tmp_path / "f")
    for one in CHATS:
        truth, found = gave[key_of(one)], kept.read(one, BF16)
        assert truth.features.shape == (len(one), 3 * 32)
        assert truth.hidden.shape == (int(one.supervised[1:].sum()), 32)
        for mine, wanted, layers in ((found.features, truth.features, 3), (found.hidden, truth.hidden, 1)):
            assert mine.dtype == BF16
            off = (mine.float() - wanted.float()).abs().unflatten(1, (layers, -1))
            number = wanted.float().abs().unflatten(1, (layers, -1))
            largest = number.amax(-1, keepdim=True)
            # half a step: of float8 in proportion to the number, of int8 to its row's largest; and bfloat16's own
            slack = {"bf16": 0 * number, "float8": number * 2**-4 + largest * 2**-10, "int8": largest / 254}[store]
            assert bool((off <= slack + number * (0 if store == "bf16" else 2**-8)).all())


@pytest.mark.usefixtures("small_shards")
def test_making_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    made(tmp_path / "whole")
    whole = shards(tmp_path / "whole")

    def stop(tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "f", on_progress=stop)
    assert shards(tmp_path / "f").items() < whole.items()
    plans: list[FeaturePlan] = []
    plan = made(tmp_path / "f", planned=plans.append)
    assert plans == [plan]
    assert plan.there + plan.conversations == len(CHATS)
    assert plan.there > 0
    assert shards(tmp_path / "f") == whole
    last = max(whole)
    (tmp_path / "f" / last).write_bytes(whole[last][:-9] if len(whole) % 2 else b"")
    store = FeatureStore(tmp_path / "f")
    if store.damaged:
        with pytest.raises(TercelError, match=r"lacks the features of \d+ of the conversations \(1 of its shards"):
            store.require(CHATS)
    made(tmp_path / "f", chats=[*CHATS, random_chat(15, 99), CHATS[0]])
    kept = FeatureStore(tmp_path / "f")
    assert kept.damaged == []
    for one in [*CHATS, random_chat(15, 99)]:
        kept.read(one, BF16)


def test_the_disk_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 0, making._SPARE + 1000))
    with pytest.raises(TercelError, match=r"features of \d+ tokens take .* free; --store float8 takes .*--limit"):
        made(tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "f"
    made(out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("years of work")
    for more, message in (
        ({"target": target_of("qwen2", BF16)}, "of a target with other weights or settings"),
        ({"target": target_of()}, "computed in bfloat16, not float32; give the same --dtype"),
        ({"layers": (1, 2, 3)}, "of layers 2, 4, 5, not 1, 2, 3"),
        ({"store": "int8"}, "kept as bf16, not int8"),
    ):
        with pytest.raises(TercelError, match=message):
            made(out, **more)
    with pytest.raises(TercelError, match="not empty and holds no features"):
        made(tmp_path / "mine")
    with pytest.raises(TercelError, match="holds no features"):
        FeatureStore(tmp_path / "mine")
    store = FeatureStore(out)
    other = chat(CHATS[0].tokens.tolist(), [True] * len(CHATS[0]))
    with pytest.raises(TercelError, match="lacks the features of 1 of the conversations; run `tercel features`"):
        store.require([*CHATS, other])
    with pytest.raises(TercelError, match="of layers 2, 4, 5, not 0, 1"):
        store.require_of(target_of(dtype=BF16), (0, 1))
    (out / "features.json").write_text('{"format": 0}')
    with pytest.raises(TercelError, match="of another version"):
        FeatureStore(out)


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    made(tmp_path)
    file = shard_file(tmp_path, 0)
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
    store = FeatureStore(tmp_path)
    with pytest.raises(TercelError, match=r"shard-000000.safetensors is damaged: conversation"):
        read_all(store)
    save_file({"something": torch.ones(2)}, file)
    assert FeatureStore(tmp_path).damaged == [file]


def test_a_run_needs_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is that of a run that asks the target, up to bfloat16's rounding in blocks of other shapes."""
    made(tmp_path / "f")
    run(tmp_path / "asked", dtype=BF16)
    monkeypatch.setattr(type(target_of(dtype=BF16)), "encode", None)
    run(tmp_path / "read", dtype=BF16, features=tmp_path / "f")
    run(tmp_path / "again", dtype=BF16, features=tmp_path / "f")
    same(tmp_path / "read", tmp_path / "again")
    heads = [load_file(tmp_path / name / "model.safetensors") for name in ("asked", "read")]
    for name, weight in heads[0].items():
        if weight.is_floating_point():
            assert float((weight - heads[1][name]).norm()) <= 0.1 * float(weight.norm()) + 1e-3, name
    monkeypatch.undo()
    with pytest.raises(TercelError, match="a run with other settings, data or target"):
        run(tmp_path / "read", dtype=BF16)
