"""What an engine needs before it can be started: its environment, the target and the head in its own form, its process.

A job (`line_protocol.py`) has further entries where an engine needs them; `target_for` and `head_for` give them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_process import EngineProcess
from line_protocol import Job

from tercel.draft import DraftModel
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.interop.engines import ENGINES
from tercel.interop.export import export_head
from tercel.target_model.model import Target
from tercel.target_model.stored import StoredTarget

HERE = Path(__file__).resolve().parent
# of environments, by what an export is written for
RUN_BY = {name: engine.run_by for name, engine in ENGINES.items()}
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Places:
    """Folders of a run: what is made of one target in `work`, engines' environments beside each other in `venvs`,
    the target's checkpoint, which is the same for all, in `target`."""

    work: Path
    venvs: Path
    target: Path

    @classmethod
    def of(cls, target: Target, work: Path, venvs: Path) -> Places:
        own = work.resolve() / target.fingerprint
        own.mkdir(parents=True, exist_ok=True)
        return cls(own, venvs.resolve(), Path(target.source.path).absolute())

    def venv(self, engine: str) -> Path:
        return self.venvs / f".venv-{RUN_BY[engine]}"

    def tool(self, engine: str, name: str) -> Path:
        return self.venv(engine) / "bin" / name


def start(engine: str, python: Path, job: Job, log: Path, venv: Path | None = None) -> EngineProcess:
    """The process of `run_ENGINE.py` with that interpreter. Raises `TercelError` if it cannot be loaded."""
    driver = HERE / f"run_{RUN_BY.get(engine, engine)}.py"
    return EngineProcess(log.stem, [python, driver], job, log, environment(engine, venv, job["threads"]))


def environment(engine: str, venv: Path | None, threads: int) -> dict[str, str]:
    plain = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if RUN_BY.get(engine) != "vllm" or venv is None:
        return plain
    preload = [path for path in (venv / "lib" / "libiomp5.so", *tcmalloc()) if path.exists()]  # for speed only
    return {
        **plain,
        "LD_PRELOAD": ":".join(map(str, preload)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }


def tcmalloc() -> list[Path]:
    return sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]


def call(places: Places, engine: str, *command: str | Path) -> None:
    """A tool of an engine's environment. Raises `TercelError` with the end of its output if it fails."""
    program = places.tool(engine, str(command[0]))
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TercelError(f"{program.name} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def made(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made by `make` under another name if it is not there: a run that was killed leaves no half."""
    if not path.exists():
        part = path.with_name(f"part-{path.name}")
        shutil.rmtree(part, ignore_errors=True)
        make(part)
        part.rename(path)
    return path


def target_for(engine: str, dtype: str, places: Places) -> Job:
    """The target as `engine` loads it; what is converted stays for the next run."""
    if engine == "llamacpp":
        kind = GGUF_TYPES[dtype]
        script = places.venv(engine) / "llama.cpp" / "convert_hf_to_gguf.py"

        def convert(part: Path) -> None:
            call(places, engine, "python", script, places.target, "--outtype", kind, "--outfile", part)

        gguf = made(places.work / f"target-{kind}.gguf", convert)
        return {"target": str(gguf), "program": str(places.tool(engine, "llama-server"))}
    if engine == "openvino":
        return {"target": str(made(places.work / "target-ov", lambda part: as_graph(places, places.target, part)))}
    return {"target": str(places.target)}


def head_for(engine: str, dtype: str, model: DraftModel, places: Places, k: int) -> Job:
    """The head, exported for `engine` anew. Raises `TercelError` if the engine cannot express it."""
    out = places.work / f"head-{engine}-{dtype}"
    shutil.rmtree(out, ignore_errors=True)
    target = StoredTarget.find(str(places.target), ask_hub=False)
    shared: dict[str, Any] = {"target": target, "shape": TreeShape.chain(k)}
    if engine == "llamacpp":
        export_head(model, engine, out, target_gguf=Path(target_for(engine, dtype, places)["target"]), **shared)
        return {"head": str(next(out.glob("*.gguf")))}
    export_head(model, engine, out, **shared)
    if engine != "openvino":
        return {"head": str(out)}
    graph = Path(f"{out}-ov")
    shutil.rmtree(graph, ignore_errors=True)
    as_graph(places, out, graph, "--trust-remote-code")
    return {"head": str(graph), "layers": json.loads((out / "openvino.json").read_text())["hidden_layers_list"]}


def as_graph(places: Places, folder: Path, out: Path, *more: str) -> None:
    """OpenVINO's graph of a model, in float32: the precision of a run is set when it is loaded."""
    task = ("--task", "text-generation-with-past", "--weight-format", "fp32")
    call(places, "openvino", "optimum-cli", "export", "openvino", "-m", folder, *task, *more, out)
