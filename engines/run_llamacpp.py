"""A llama.cpp server, driven line by line: method "vanilla" or "eagle3". Needs nothing but Python's own library.

The job's `program` is the server, `cache` the type of its key-value cache.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

from line_protocol import Answer, Job, Loaded, Question, end_with_parent, serve

START_SECONDS, ANSWER_SECONDS = 120, 600


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


class LlamaCpp(Loaded):
    def __init__(self, job: Job) -> None:
        self.job = job
        told = subprocess.run([job["program"], "--version"], capture_output=True, text=True, check=True)
        version = re.search(r"version: (.*)", told.stderr + told.stdout)
        self.version = version[1] if version else "unknown"
        port, cache = free_port(), job["cache"]
        given = ["-c", str(job["context"]), "-np", "1", "-t", str(job["threads"]), "-ctk", cache, "-ctv", cache]
        if job["method"] == "eagle3":
            given += ["-md", job["head"], "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(job["k"])]
            # never a draft cut short for its low probability: other engines do not
            given += ["--spec-draft-p-min", "0", "-ctkd", cache, "-ctvd", cache]
        self.settings = {"cache": cache, "given": " ".join(given)}
        self.address = f"http://127.0.0.1:{port}"
        where = ["-m", job["target"], "--host", "127.0.0.1", "--port", str(port), "--metrics"]
        self.process = subprocess.Popen(
            [job["program"], *where, *given],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            preexec_fn=end_with_parent,
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                get(f"{self.address}/health")
                return
            except (URLError, OSError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("llama-server did not start") from None
                time.sleep(0.2)

    def counters(self) -> tuple[int, dict[int, int]]:
        text = get(f"{self.address}/metrics")
        per_position = re.findall(r'num_accepted_tokens_per_pos_total\{position="(\d+)"\} (\d+)', text)
        drafts = re.search(r"^llamacpp:spec_decode_num_drafts_total (\d+)", text, re.MULTILINE)
        return int(drafts[1]) if drafts else 0, {int(position): int(count) for position, count in per_position}

    def answer(self, question: Question) -> Answer:
        asked = {
            "prompt": question.prompt,
            "n_predict": question.max_new_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "cache_prompt": False,
            "return_tokens": True,
        }
        if question.temperature:
            asked |= {"samplers": ["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        kind = {"Content-Type": "application/json"}
        request = Request(f"{self.address}/completion", json.dumps(asked).encode(), kind, method="POST")
        before = None if self.job["method"] == "vanilla" else self.counters()
        start = time.perf_counter()
        with urlopen(request, timeout=ANSWER_SECONDS) as reply:
            done = json.load(reply)
        seconds = time.perf_counter() - start
        tokens = list(done["tokens"])
        if done["stop_type"] == "eos":
            tokens.append(self.job["eos"][0])  # which of them it was is not told
        if before is None:
            return Answer(tokens, seconds, len(tokens) - 1)
        drafts, counts = self.counters()
        accepted = [counts.get(place, 0) - before[1].get(place, 0) for place in range(self.job["k"])]
        # not every step has a draft
        return Answer(tokens, seconds, max(0, len(tokens) - 1 - sum(accepted)), drafts - before[0], accepted)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


if __name__ == "__main__":
    serve(LlamaCpp)
