"""This package, driven line by line: method "vanilla" (token by token), "eagle3" (the tree that it chooses itself) or
"chain" (EAGLE-3 with chains of the job's `k`, as engines draft that know no trees). `backend` of the job is what is
asked to compute the target; the settings tell what does."""

from __future__ import annotations

import time
from importlib.metadata import version

import torch
from line_protocol import Answer, Job, Loaded, Question, serve

from tercel import Engine, Request, SamplingParams, TreeShape, load_draft, make_proposer
from tercel.decode.proposers import EAGLE3, VANILLA
from tercel.target_model.backends import load_target


class Tercel(Loaded):
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job["threads"])
        self.version, self.eos = version("tercel"), tuple(job["eos"])
        dtype = getattr(torch, job["dtype"])
        target = load_target(job["target"], backend=job["backend"], say=print, dtype=dtype)
        target.expect_many()
        self.settings = {"backend_asked_for": job["backend"], "backend": target.backend}
        self.drafts = job["method"] != VANILLA
        if self.drafts:
            shape = TreeShape.chain(job["k"]) if job["method"] == "chain" else None
            proposer = make_proposer(EAGLE3, target, head=load_draft(job["head"], target), shape=shape)
            self.settings["draft"] = str(shape) if shape else "as the package chooses"
        else:
            proposer = make_proposer(VANILLA, target)
        self.engine = Engine(target, proposer)

    def answer(self, question: Question) -> Answer:
        params = SamplingParams(
            temperature=question.temperature,
            seed=question.seed,
            max_new_tokens=question.max_new_tokens,
            stop_token_ids=self.eos,
        )
        start = time.perf_counter()
        (done,) = self.engine.generate([Request(tuple(question.prompt), params)])
        seconds = time.perf_counter() - start
        if not self.drafts:
            return Answer(list(done.tokens), seconds, done.steps)
        deepest = max(done.accepted, default=0)
        accepted = [sum(count > place for count in done.accepted) for place in range(deepest)]
        return Answer(list(done.tokens), seconds, done.steps, len(done.accepted), accepted)


if __name__ == "__main__":
    serve(Tercel)
