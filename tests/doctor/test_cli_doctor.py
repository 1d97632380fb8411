"""`tercel doctor` and `tercel serve-command` as a user runs them."""

from __future__ import annotations

import ast
import csv
import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from tercel.measure.chains import read_as
from tests.cli.running import everything, refused, run
from tests.doctor.servers_for_tests import FakeSglang, FakeVllm, running
from tests.overfit import ANSWER, STEPS, TEXTS, World, edit_json
from tests.tiny import save_tiny


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world.head_folder, tmp_path / "head"))


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{i}", "turns": [text]}) + "\n" for i, text in enumerate(TEXTS)))
    return str(path)


def unfolded(shown: str) -> str:
    """The text of a table without its borders and line ends."""
    return " ".join(shown.replace("│", " ").split())


def test_a_right_head(world: World, folder: Path, tmp_path: Path) -> None:
    before = everything(folder)
    ended = run("doctor", str(world.folder), str(folder), "--json", str(tmp_path / "report.json"))
    assert (ended.code, ended.err) == (0, "")
    assert "0 problems, 0 warnings" in ended.out
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert report["ok"] is True
    assert report["server"] is None
    assert {finding["level"] for finding in report["findings"]} == {"ok", "note"}
    assert everything(folder) == before


def test_a_problem_ends_with_code_1_and_says_what_to_do(world: World, folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(rope_theta=300.0))
    ended = run("doctor", str(world.folder), str(folder))
    assert ended.code == 1
    assert "1 problem, 0 warnings" in ended.out
    assert "rope_theta 300" in ended.out
    assert "→ export the head again" in ended.out


def test_a_folder_that_the_engine_reads_otherwise(world: World, folder: Path) -> None:
    right = run("doctor", str(world.folder), str(folder), "--engine", "vllm")
    assert right.code == 0
    assert "the engine's loader reads the folder" in right.out.lower()
    edit_json(folder / "config.json", lambda config: config.update(norm_output=True))
    wrong = run("doctor", str(world.folder), str(folder), "--engine", "vllm")
    assert "vllm would compute with norm_output True" in unfolded(wrong.out)
    assert "tercel export HEAD --to vllm" in unfolded(wrong.out)


def test_a_head_of_another_target_is_examined_all_the_same(world: World, folder: Path, tmp_path: Path) -> None:
    other = str(save_tiny(tmp_path, "llama", num_hidden_layers=4, vocab_size=160))
    ended = run("doctor", other, str(folder))
    assert ended.code == 1
    assert "is for a target of 8 layers, but" in unfolded(ended.out)
    assert "is for a vocabulary of 128 tokens, but" in unfolded(ended.out)
    assert "rope" in ended.out
    with running(FakeVllm(world.target.tokenizer, {}, STEPS)) as url:
        ended = run("doctor", other, str(folder), "--url", url)
    assert ended.code == 1
    assert "the server was not asked anything" in ended.out.lower()


def test_against_a_server(world: World, folder: Path, tasks: str, tmp_path: Path) -> None:
    asked = ["--tasks", tasks, "--max-new-tokens", str(ANSWER), "--json", str(tmp_path / "report.json")]
    chat = world.prompts[0].tokens
    with running(FakeVllm(world.target.tokenizer, world.decoded(world.head), STEPS, chat)) as url:
        ended = run("doctor", str(world.folder), str(folder), "--url", url, *asked)
    assert (ended.code, ended.err) == (0, "")
    assert "this head should reach" in ended.out
    low = world.decoded(read_as(world.head, feature_layers=(1, 3, 4)))
    with running(FakeSglang(world.target.tokenizer, low, STEPS, chat)) as url:
        ended = run("doctor", str(world.folder), str(folder), "--url", f"{url}/v1", "--engine", "sglang", *asked)
    assert ended.code == 1
    assert "likely cause: layer ids -1 (1, 3, 4)" in unfolded(ended.out)
    server = json.loads((tmp_path / "report.json").read_text("utf-8"))["server"]
    assert server["causes"][0]["setting"] == "layer ids -1 (1, 3, 4)"
    assert server["ratio_ci95"][1] < 1
    assert len(server["acceptance_server"]["per_position"]) == STEPS


def test_wrong_input(world: World, folder: Path, tmp_path: Path) -> None:
    target = str(world.folder)
    refused(run("doctor", target, str(tmp_path / "none")), "there is no head", "none")
    refused(run("doctor", target, str(folder), "--tasks", "demo:2"), "--url")
    refused(run("doctor", target, str(folder), "--url", "localhost:8000"), "not the address of a server")
    for url in ("http://höst:8000", "http://[::1", "http://host:99999", "http://me:secret@host", "http://a..b"):
        refused(run("doctor", target, str(folder), "--url", url), "address of a server")
    refused(
        run("doctor", target, str(folder), "--url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"
    )
    (folder / "model.safetensors").write_bytes(b"")
    refused(run("doctor", target, str(folder)), "model.safetensors")
    refused(run("doctor", str(folder), str(folder)), "draft head")


# ------------------------------------------------------------------------------------------------------ serve-command


def test_launch_lines(world: World, folder: Path, tmp_path: Path) -> None:
    ended = run("serve-command", str(folder), "--engine", "vllm", "--target", str(world.folder), "--depth", "3")
    assert (ended.code, ended.err) == (0, "")
    words = shlex.split(ended.out)
    assert words[:3] == ["vllm", "serve", str(world.folder)]
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative == {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    tree = ["--depth", "3", "--top-k", "4", "--nodes", "12", "--json", str(tmp_path / "line.json")]
    ended = run("serve-command", str(folder), "--engine", "sglang", "--target", "owner/name", *tree)
    words = shlex.split(ended.out)
    assert words[words.index("--model-path") + 1] == "owner/name"
    assert words[words.index("--speculative-eagle-topk") + 1] == "4"
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "12"
    assert json.loads((tmp_path / "line.json").read_text("utf-8"))["command"] == ended.out.rstrip("\n")


def test_lines_for_several_machines(world: World, folder: Path) -> None:
    asked = ["serve-command", str(folder), "--target", str(world.folder)]
    spread = ["--tensor-parallel", "4", "--pipeline-parallel", "2", "--data-parallel", "2"]
    on_two = ["--machines", "2", "--address", "10.0.0.1"]
    ended = run(*asked, "--engine", "vllm", *spread, *on_two)
    assert ended.code == 0
    comment, first, other, second = ended.out.splitlines()
    assert "10.0.0.1" in comment
    assert other == "# machine 1"
    for node, line in enumerate((first, second)):
        words = shlex.split(line)
        for name, value in {
            **{"--tensor-parallel-size": "4", "--pipeline-parallel-size": "2", "--data-parallel-size": "2"},
            **{"--nnodes": "2", "--node-rank": str(node), "--master-addr": "10.0.0.1"},
        }.items():
            assert words[words.index(name) + 1] == value
        assert ("--headless" in words) == bool(node)
        assert ("--host" in words) == (not node)
    ended = run(*asked, "--engine", "sglang", "--tensor-parallel", "16", *on_two)
    words = [word for word in shlex.split(ended.out.split("# machine 1\n")[1]) if word.strip()]
    sizes = {"--tp-size": "16", "--nnodes": "2", "--node-rank": "1", "--dist-init-addr": "10.0.0.1:"}
    for name, value in sizes.items():
        assert words[words.index(name) + 1].startswith(value)
    for engine, wrong, part in (
        ("vllm", ["--tensor-parallel", "3", *on_two], "not as many"),
        ("vllm", ["--tensor-parallel", "2", "--machines", "2"], "address"),
        ("vllm", ["--tensor-parallel", "2", "--machines", "2", "--address", "a b;c"], "address"),
        ("vllm", ["--container", "--compose"], "one of them"),
        ("vllm", ["--compose", "--tensor-parallel", "2", *on_two], "one machine"),
        ("sglang", ["--pipeline-parallel", "2"], "pipeline"),
        ("sglang", ["--data-parallel", "2", *on_two], "router"),
        ("trtllm", ["--tensor-parallel", "2"], "TensorRT-LLM"),
        ("trtllm", ["--container"], "no container"),
    ):
        refused(run(*asked, "--engine", engine, *wrong), part)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_containers_have_the_head_mounted(world: World, folder: Path, tmp_path: Path, engine: str) -> None:
    """A line for Docker, and a compose file, of the keys that Compose's schema has."""
    spaced = tmp_path / "a $head"
    shutil.copytree(folder, spaced)
    asked = ["serve-command", str(spaced), "--target", str(world.folder), "--engine", engine, "--tensor-parallel", "2"]
    plain = [word for word in shlex.split(run(*asked).out) if word.strip()]
    words = shlex.split(run(*asked, "--container").out)
    assert words[:2] == ["docker", "run"]
    mounts = [words[place + 1] for place, word in enumerate(words) if word == "--mount"]
    assert mounts == [f"type=bind,source={path},target={path},readonly" for path in (spaced, world.folder)]
    image = next(place for place, word in enumerate(words) if word.startswith(("vllm/", "lmsysorg/")))
    assert ":v0." in words[image]
    inside = words[image + 1 :]
    assert inside[-2:] == ["--host", "0.0.0.0"]
    assert inside[1:-2] == plain[3 if engine == "vllm" else 1 :]
    whole = yaml.safe_load(run(*asked, "--compose").out)
    assert whole.keys() == {"services"}
    service = whole["services"][engine]
    assert service["command"] == [word.replace("$", "$$") for word in inside]
    assert service["image"] == words[image]
    assert service["volumes"][0] == {
        **{"type": "bind", "read_only": True},
        **dict.fromkeys(("source", "target"), str(spaced).replace("$", "$$")),
    }
    (gpus,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert gpus == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    ast.parse(service["healthcheck"]["test"][-1])
    known = {"image", "command", "ports", "ipc", "volumes", "deploy", "healthcheck", "restart", "environment"}
    assert service.keys() <= known
    hub = yaml.safe_load(run(*asked[:3], "owner/name", *asked[4:], "--compose").out)
    assert [volume["type"] for volume in hub["services"][engine]["volumes"]] == ["bind", "volume"]
    assert hub["volumes"].keys() == {hub["services"][engine]["volumes"][1]["source"]}


def test_a_head_of_the_hubs_cache_is_mounted_with_its_files(world: World, folder: Path, tmp_path: Path) -> None:
    """Whose folder holds links into another."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    shutil.copytree(folder, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    asked = ["serve-command", str(snapshot), "--target", "owner/name", "--engine", "vllm"]
    words = shlex.split(run(*asked, "--container").out)
    mounts = [words[place + 1] for place, word in enumerate(words) if word == "--mount"]
    there = [snapshot, *sorted(blobs.iterdir())]
    assert mounts == [f"type=bind,source={path},target={path},readonly" for path in there]
    volumes = yaml.safe_load(run(*asked, "--compose").out)["services"]["vllm"]["volumes"]
    assert [volume["source"] for volume in volumes if volume["type"] == "bind"] == list(map(str, there))


def test_a_mount_of_an_odd_path_is_one_field_of_csv(world: World, folder: Path, tmp_path: Path) -> None:
    odd = tmp_path / 'a "head", of mine'
    (tmp_path / "beside").mkdir()
    shutil.copytree(folder, odd)
    asked = ["serve-command", str(tmp_path / "beside" / ".." / odd.name), "--target", "owner/name", "--engine", "vllm"]
    words = shlex.split(run(*asked, "--container").out)
    (fields,) = csv.reader([words[words.index("--mount") + 1]], strict=True)
    assert fields == ["type=bind", f"source={odd}", f"target={odd}", "readonly"]
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == str(odd)
    for name in ("a\nhead", "a head "):
        asked[1] = str(shutil.copytree(folder, tmp_path / name))
        refused(run(*asked, "--container"), "Docker", repr(asked[1]), "rename it")
        assert run(*asked, "--compose").code == 0


def test_a_folder_that_the_engine_would_misread(world: World, folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(norm_before_residual=True))
    ended = run("serve-command", str(folder), "--engine", "vllm", "--target", str(world.folder))
    assert ended.code == 0
    assert ended.out.startswith("vllm serve")
    assert ended.err.startswith("warning: vllm would not load this folder as it is meant (vllm would compute with")
    assert f"tercel export {folder} --to vllm --out DIR" in ended.err
    ended = run("serve-command", str(folder), "--engine", "trtllm", "--target", str(world.folder))
    assert ended.out.startswith("trtllm-serve")
    assert "no trtllm.yaml" in ended.err


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": "wide"}, {"num_attention_heads": 0}, {"eagle_config": [1]}, {"rope_scaling": [3]}]
)
def test_settings_that_an_engine_cannot_use(world: World, folder: Path, wrong: dict[str, object]) -> None:
    edit_json(folder / "config.json", lambda config: config.update(wrong))  # tercel.json, which is read here, is whole
    ended = run("serve-command", str(folder), "--engine", "vllm", "--target", str(world.folder))
    assert ended.code == 0
    assert "vllm would not load this folder as it is meant (vLLM would stop at a setting" in ended.err


def test_wrong_input_for_a_launch_line(world: World, folder: Path, tmp_path: Path) -> None:
    refused(run("serve-command", str(folder), "--engine", "vllm", "--top-k", "4"), "drafts only chains")
    refused(run("serve-command", str(tmp_path / "none"), "--engine", "vllm"), "there is no head")
    edit_json(folder / "tercel.json", lambda values: values.update(target=None))
    refused(run("serve-command", str(folder), "--engine", "vllm"), "give the target")
    other = str(save_tiny(tmp_path, "llama", num_hidden_layers=4))
    refused(run("serve-command", str(folder), "--engine", "vllm", "--target", other), "8 layers", "4")
