"""Stock `generate()` of transformers, driven line by line: method "vanilla", "lookup" (drafts looked up in the text so
far) or "assisted" (a small model drafts; the job's `assistant` is its folder)."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from line_protocol import Answer, Job, Loaded, Question, serve
from transformers import AutoModelForCausalLM, GenerationConfig

LONGEST_NGRAM = 3


class Transformers(Loaded):
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job["threads"])
        self.job, self.version = job, transformers.__version__
        self.model = self._model(job["target"])
        self.runs = 0
        self.model.register_forward_hook(self._count)
        self.drafting: dict[str, Any] = {}
        self.settings = {"attention": self.model.config._attn_implementation, "compiled": False}
        if job["method"] == "lookup":
            self.drafting = {"prompt_lookup_num_tokens": job["k"], "max_matching_ngram_size": LONGEST_NGRAM}
            self.settings |= self.drafting
        elif job["method"] == "assisted":
            assistant = self._model(job["assistant"])
            assistant.generation_config = GenerationConfig(
                num_assistant_tokens=job["k"], num_assistant_tokens_schedule="constant"
            )
            self.drafting = {"assistant_model": assistant}
            self.settings |= {"assistant": job["assistant"], "num_assistant_tokens": job["k"], "schedule": "constant"}

    def _model(self, folder: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, self.job["dtype"]))
        model.generation_config = GenerationConfig()  # `generate()` would fill in from the model's own
        return model.eval()

    def _count(self, *seen: Any) -> None:
        self.runs += 1

    def answer(self, question: Question) -> Answer:
        config = GenerationConfig(
            max_new_tokens=question.max_new_tokens, eos_token_id=self.job["eos"], pad_token_id=self.job["eos"][0]
        )
        if question.temperature:
            config.update(do_sample=True, temperature=question.temperature, top_k=0, top_p=1.0)
        torch.manual_seed(question.seed)
        self.runs = 0
        start = time.perf_counter()
        ids = torch.tensor([question.prompt])
        with torch.no_grad():
            done = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, **self.drafting
            )
        tokens = done[0, len(question.prompt) :].tolist()
        return Answer(tokens, time.perf_counter() - start, self.runs - 1)


if __name__ == "__main__":
    serve(Transformers)
