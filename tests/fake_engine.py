"""A driver without an engine behind it: it answers at once, says how long that took, and notes that it was asked.

Its job: name; notes (a file); seconds (of an answer); tokens (the answer); and, where wanted, unloadable, dies_at (the
question that ends it), spins (a thread that never rests), works (processor time of an answer).
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from line_protocol import Answer, Job, Loaded, Question, serve


def spin() -> None:
    while True:
        pass


class Fake(Loaded):
    version = "7"

    def __init__(self, job: Job) -> None:
        print("a library's chatter", flush=True)
        if job.get("unloadable"):
            raise ValueError("no such\nmodel")
        self.job, self.asked = job, 0
        self.settings = {"threads": job.get("threads")}
        if job.get("spins"):
            threading.Thread(target=spin, daemon=True).start()

    def answer(self, question: Question) -> Answer:
        self.asked += 1
        with Path(self.job["notes"]).open("a") as notes:
            notes.write(f"{self.job['name']} {question.prompt[0]} {question.max_new_tokens}\n")
        if self.asked == self.job.get("dies_at"):
            os._exit(3)
        end = time.process_time() + self.job.get("works", 0.0)
        while time.process_time() < end:
            pass
        return Answer(self.job["tokens"], self.job["seconds"], 2, 2, [2, 1])


if __name__ == "__main__":
    serve(Fake)
