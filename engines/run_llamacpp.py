"""One llama.cpp server run for `prove.py`: a job file in, a result file out. Needs nothing but Python's own library."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

START_SECONDS = 120
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


@contextmanager
def server(job: dict[str, Any], log: Path) -> Iterator[str]:
    """The address of a running `llama-server`; it is stopped when the block ends."""
    port, kind = free_port(), TYPES[job["dtype"]]
    command = [job["program"], "-m", job["target"], "--host", "127.0.0.1", "--port", str(port), "--metrics"]
    # one sequence; the cache in the weights' own precision, where the default is f16
    command += ["-c", str(job["context"]), "-np", "1", "-t", str(job["threads"]), "-ctk", kind, "-ctv", kind]
    if job["head"] is not None:
        command += ["-md", job["head"], "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(job["k"])]
        # never a draft cut short for its low probability: other engines do not
        command += ["--spec-draft-p-min", "0", "-ctkd", kind, "-ctvd", kind]
    with log.open("w") as stream, subprocess.Popen(command, stdout=stream, stderr=stream) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(f"{address}/health", process, log)
            yield address
        finally:
            process.terminate()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            get(url)
            return
        except (URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("llama-server did not start:\n" + log.read_text()[-2000:]) from None
            time.sleep(0.2)


def counters(address: str) -> dict[str, Any]:
    text = get(f"{address}/metrics")
    per_position = re.findall(r'num_accepted_tokens_per_pos_total\{position="(\d+)"\} (\d+)', text)
    drafts = re.search(r"^llamacpp:spec_decode_num_drafts_total (\d+)", text, re.MULTILINE)
    return {
        "drafts": int(drafts[1]) if drafts else 0,
        "accepted": {int(position): int(count) for position, count in per_position},
    }


def complete(address: str, prompt: list[int], max_new_tokens: int) -> list[int]:
    asked = {
        "prompt": prompt,
        "n_predict": max_new_tokens,
        "temperature": 0.0,
        "cache_prompt": False,
        "return_tokens": True,
    }
    request = Request(
        f"{address}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urlopen(request, timeout=600) as answer:
        return list(json.load(answer)["tokens"])


def main(job_file: Path, result_file: Path) -> None:
    job = json.loads(job_file.read_text())
    with server(job, result_file.with_suffix(".log")) as address:
        complete(address, job["prompts"][0], job["max_new_tokens"])  # warm-up
        before = counters(address)
        answers, seconds = [], []
        for prompt in job["prompts"]:
            start = time.perf_counter()
            answers.append(complete(address, prompt, job["max_new_tokens"]))
            seconds.append(time.perf_counter() - start)
        after = counters(address)
    told = subprocess.run([job["program"], "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"version: (.*)", told.stderr + told.stdout)
    result: dict[str, Any] = {"version": version[1] if version else "unknown", "answers": answers, "seconds": seconds}
    if job["head"] is not None:
        result["drafts"] = after["drafts"] - before["drafts"]
        result["accepted"] = [
            after["accepted"].get(i, 0) - before["accepted"].get(i, 0) for i in range(job["k"])
        ]
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
