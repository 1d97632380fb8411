"""What a row can do to a run: end as one sentence, never fill the machine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tercel import limits
from tercel.chat import lines, read_records
from tercel.errors import TercelError
from tercel.measure.tasks import load_task

GOOD = {"id": "good", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
DEEP = "[" * 10_000 + "]" * 10_000
LONG = "9" * 5_000


def rows(path: Path, *texts: str) -> Path:
    path.write_text("\n".join([json.dumps(GOOD), *texts]) + "\n", encoding="utf-8")
    return path


def row(**more: object) -> str:
    return json.dumps({**GOOD, "id": "bad", **more})


def saying(content: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]})


BAD_ROWS = {
    "deep": (f'{{"messages": [], "x": {DEEP}}}', "JSON nested more than 64 deep"),
    "nested calls": (row(messages=[{"role": "user", "content": "x", "tool_calls": DEEP}]), "nested more than 64 deep"),
    "digits": (f'{{"x": {LONG}}}', "a number of more than 40 digits"),
    "some digits": (f'{{"x": {LONG[:400]}}}', "a number of more than 40 digits"),
    "surrogate": (row(source="\ud83d"), r"a string that is not text: character 1 is '\ud83d', a lone surrogate"),
    "surrogate key": ('{"\\udc00": 1}', "a string that is not text"),
    "no JSON": ("{", "not JSON (Expecting property name enclosed in double quotes, column 2)"),
}


@pytest.mark.parametrize("fault", BAD_ROWS)
@pytest.mark.parametrize("form", ["lines", "list"])
def test_a_faulty_row_is_told_with_its_place(tmp_path: Path, fault: str, form: str) -> None:
    text, words = BAD_ROWS[fault]
    path = rows(tmp_path / "a.jsonl", text)
    if form == "list":
        path.write_text(f"[{json.dumps(GOOD)},\n{text}, {json.dumps(GOOD)}]", encoding="utf-8")
        words = {"digits": "digits", "deep": "deep", "no JSON": "not JSON"}.get(fault, words)
    with pytest.raises(TercelError) as caught:
        list(read_records(path))
    assert words in str(caught.value)
    assert f"{path}, {'line' if form == 'lines' else 'entry'} 2" in str(caught.value)


@pytest.mark.parametrize("form", ["lines", "list"])
def test_bytes_that_are_no_text_are_told_with_their_row(tmp_path: Path, form: str) -> None:
    good = json.dumps(GOOD).encode()
    bad = good.replace(b"hi", b"h\xff")
    path = tmp_path / "a.json"
    path.write_bytes(good + b"\n" + bad if form == "lines" else b"[" + good + b"," + bad + b"]")
    where = "line 2" if form == "lines" else "entry 2"
    with pytest.raises(TercelError, match=rf"{where}: the byte 0xff is not UTF-8"):
        list(read_records(path))
    if form == "lines":
        with pytest.raises(TercelError, match=rf"{where}: the byte 0xff is not UTF-8"):
            load_task(str(path), [])


def test_a_lone_surrogate_in_a_task(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "fine"}\n\n{"prompt": "\\ud800"}\n')
    with pytest.raises(TercelError, match=r"a\.jsonl, line 3: a string that is not text"):
        load_task(str(path), [])
    with pytest.raises(TercelError, match="not a number of questions"):
        load_task(f"{path}:{LONG}", [])


def test_long_lines_and_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINE_BYTES", 1 << 20)
    monkeypatch.setattr(lines, "BLOCK", 1 << 18)
    path = rows(tmp_path / "a.jsonl", saying("x" * (1 << 20)), json.dumps(GOOD))
    with pytest.raises(TercelError, match=r"a\.jsonl, line 2: longer than the 1 MiB that a line may have"):
        list(read_records(path))
    path.write_text(f"[{json.dumps(GOOD)},{saying('x' * (1 << 22))}]")
    with pytest.raises(TercelError, match=r"a\.jsonl, entry 2: longer than the 1 MiB"):
        list(read_records(path))


@pytest.mark.parametrize("blank", [b"\n", b" "])
def test_blanks_that_unpack_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: bytes) -> None:
    monkeypatch.setattr(limits, "UNPACKED_FREE", 1 << 20)
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb") as stream:
        for _ in range(64):
            stream.write(blank * (1 << 18))
    with pytest.raises(TercelError, match=r"unpacks to more than .* MiB, 200 times its size"):
        list(read_records(path))


@pytest.mark.parametrize("form", ["lines", "list"])
def test_gzip_is_told_by_its_bytes(tmp_path: Path, form: str) -> None:
    text = json.dumps(GOOD) if form == "lines" else json.dumps([GOOD])
    (tmp_path / "a.json").write_bytes(gzip.compress(text.encode("utf-8-sig")))
    (tmp_path / "plain.gz").write_text(text)
    (tmp_path / "tasks.jsonl").write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    for name in ("a.json", "plain.gz"):
        assert [record.id for record in read_records(tmp_path / name)] == ["good"]
    assert load_task(str(tmp_path / "tasks.jsonl"), []).name == "tasks"


@pytest.mark.parametrize("damage", ["cut", "bits", "header"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(json.dumps(GOOD).encode() * 50))
    if damage == "bits":
        packed[20] ^= 0xFF
    (tmp_path / "a.gz").write_bytes(packed[:30] if damage == "cut" else packed[:4] if damage == "header" else packed)
    with pytest.raises(TercelError, match=r"cannot read .*a\.gz: .*is the file whole"):
        list(read_records(tmp_path / "a.gz"))


@pytest.mark.parametrize("rest", ["[]", json.dumps([GOOD]), "x", f"\n\n{json.dumps(GOOD)}"])
def test_nothing_behind_a_list_is_dropped(tmp_path: Path, rest: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps([GOOD]) + rest)
    with pytest.raises(TercelError, match=r"entry 2: the list has ended before it, but .* follows"):
        list(read_records(tmp_path / "a.json"))


@pytest.mark.parametrize("between", [" ", "", "\n"])
def test_entries_without_a_comma_between_are_no_list(tmp_path: Path, between: str) -> None:
    row = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    path = tmp_path / "chats.json"
    path.write_text(f"[{row}{between}{row}]", encoding="utf-8")
    with pytest.raises(TercelError, match=r"chats.json, entry 2: not JSON .a comma is missing before it.; repair"):
        list(read_records(path))


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rows(tmp_path / "a.jsonl")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(TercelError, match=r"cannot read .*a\.jsonl: Permission denied"):
        list(read_records(path))
    with pytest.raises(TercelError, match="there is no file"):
        list(read_records("x" * 300))
