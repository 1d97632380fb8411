"""lm-eval and the official OpenAI client against a running `tercel serve`, with a head and without: what they get is
what this package computes without a server.

    make lmeval-venv && python bench/lmeval.py --json out/lmeval.json
    python bench/lmeval.py ./my-model my-head --serve --dtype float32

lm-eval asks with `local-completions` a task of its own making over the demo questions: which of four answers is the
likeliest (`loglikelihood`, which takes `echo` and `logprobs`), how likely an answer's text is
(`loglikelihood_rolling`), and an answer up to a stop string (`generate_until`). Every number that it logs is compared.
Exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from openai import OpenAI
from serving import served

from tercel.decode.engine import Engine
from tercel.decode.generation_config import sampling_for
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.files import write_json
from tercel.measure.machine import describe
from tercel.measure.tasks import DEMO, parse_tasks
from tercel.target_model.backends import load_target
from tercel.target_model.protocol import TargetModel
from tercel.target_model.sources import parse_dtype

ROOT = Path(__file__).resolve().parents[1]
STOP = "\n\n"
CHOICES = 4
TASKS: dict[str, dict[str, Any]] = {
    "tercel_choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{right}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "tercel_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "tercel_answers": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def answer(target: TargetModel, ids: Sequence[int], most: int, **asked: Any) -> str:
    params = sampling_for(target, max_new_tokens=most, **asked)
    return Engine(target, Vanilla()).generate([Request(tuple(ids), params)])[0].require().text


def documents(target: TargetModel, questions: Sequence[str], most: int) -> list[dict[str, Any]]:
    """Rows of the task's data: a question, what the target says to it, and that beside what it says to others."""
    texts = [answer(target, encoded(target, question), most, stop=(STOP,)) for question in questions]
    rows = []
    for place, (question, text) in enumerate(zip(questions, texts, strict=True)):
        choices = [" ".join(texts[(place + other) % len(texts)].split()[:8]) or "nothing" for other in range(CHOICES)]
        right = place % CHOICES
        choices[0], choices[right] = choices[right], choices[0]
        rows.append({"question": question, "answer": text, "choices": choices, "right": right, "text": question})
    return rows


def write_tasks(folder: Path, rows: Sequence[dict[str, Any]], most: int) -> None:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, task in TASKS.items():
        whole = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **task,
        }
        if task["output_type"] == "generate_until":
            how = {"until": [STOP], "max_gen_toks": most, "temperature": 0.0, "do_sample": False}
            whole["generation_kwargs"] = how
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")


def harness(venv: Path, folder: Path, url: str, out: Path) -> dict[str, Any]:
    """What lm-eval reports, and the samples of each task."""
    model = {
        "model": "served",
        "base_url": f"{url}/v1/completions",
        "num_concurrent": 4,
        "max_retries": 1,
        "tokenized_requests": True,
        "tokenizer_backend": "huggingface",
        "tokenizer": folder / "tokenizer",
    }
    command = [venv / "bin" / "python", "-m", "lm_eval", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
    command += ["--include_path", folder, "--tasks", ",".join(TASKS), "--output_path", out, "--log_samples"]
    offline = {name: "1" for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")}
    cache = {"HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": "none"}
    done = subprocess.run([str(part) for part in command], env={**os.environ, **offline, **cache}, check=False)
    if done.returncode:
        raise SystemExit("lm-eval failed; see above")
    (report,) = out.rglob("results_*.json")
    samples = {}
    for name in TASKS:
        (file,) = out.rglob(f"samples_{name}_*.jsonl")
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        samples[name] = sorted(rows, key=lambda row: row["doc_id"])
    return {"results": json.loads(report.read_text("utf-8"))["results"], "samples": samples}


def encoded(target: TargetModel, text: str) -> list[int]:
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def likelihood(target: TargetModel, context: Sequence[int], text: Sequence[int]) -> tuple[float, bool]:
    """Of token ids behind others, and whether they are the likeliest there; by one forward, without a server."""
    asked = Request((*context, *text), sampling_for(target, max_new_tokens=1), logprobs=1, echo=True)
    (first, *_) = Engine(target, Vanilla()).stream([asked])
    told = first.prompt_logprobs[len(context) - 1 :]
    return sum(one.logprob for one in told), all(one.token == one.likeliest[0][0] for one in told)


def differences(target: TargetModel, samples: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[float | str]:
    """Of every number: by how much lm-eval's differs; of what is no number, a sentence where it does."""
    for sample in samples["tercel_choices"]:
        for asked, (given, *_) in zip(arguments(sample), sample["resps"], strict=True):
            context = encoded(target, asked[0])
            whole = encoded(target, asked[0] + asked[1])
            ours, greedy = likelihood(target, context, whole[len(context) :])
            yield abs(ours - float(given[0]))
            if greedy != (str(given[1]) == "True"):
                yield f"greedy {given[1]} instead of {greedy} for {asked[1]!r}"
    for sample in samples["tercel_texts"]:
        (asked,), ((given, *_),) = arguments(sample), sample["resps"]
        ids = encoded(target, asked[0])
        tokenizer = target.tokenizer  # of which lm-eval puts a token before a text
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        ours, _ = likelihood(target, [first], ids)
        yield abs(ours - float(given[0] if isinstance(given, list) else given))
    for sample, row in zip(samples["tercel_answers"], rows, strict=True):
        if sample["resps"][0][0] != row["answer"]:
            yield f"{sample['resps'][0][0]!r} instead of {row['answer']!r}"


def arguments(sample: dict[str, Any]) -> list[list[Any]]:
    """Of a sample's requests, in whichever way they were logged."""
    given = sample["arguments"]
    listed = list(given.values()) if isinstance(given, dict) else given
    return [list(one.values()) if isinstance(one, dict) else list(one) for one in listed]


def client(target: TargetModel, url: str, questions: Sequence[str], most: int) -> list[str]:
    """The official client's answers beside those without a server: whole and streamed, greedy and drawn."""
    faults = []
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as asking:
        for number, question in enumerate(questions):
            how: dict[str, Any] = {"temperature": 0} if number % 2 else {"temperature": 0.8, "top_p": 0.95, "seed": 7}
            chat: Any = {"model": "served", "messages": [{"role": "user", "content": question}], "max_tokens": most}
            whole = asking.chat.completions.create(**chat, **how).choices[0].message.content
            stream = asking.chat.completions.create(**chat, **how, stream=True)
            pieces = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            params = sampling_for(target, sample=how["temperature"] > 0, max_new_tokens=most, **how)
            request = Request.chat(target, question, params)
            truth = Engine(target, Vanilla()).generate([request])[0].require().text
            faults += [f"openai: {text!r} instead of {truth!r}" for text in (whole, pieces) if text != truth]
    return faults


def compared(
    given: argparse.Namespace, target: TargetModel, rows: Sequence[dict[str, Any]], folder: Path, way: str
) -> dict[str, Any]:
    """One server: its numbers beside our own."""
    head = [given.head] if given.head and way != "vanilla" else []
    without = ["--draft", "none"] if way == "vanilla" else []
    questions = [row["question"] for row in rows]
    with served([given.target, *head, "--name", "served", "--dtype", given.dtype, *without, *given.serve]) as (url, _):
        told = harness(given.venv, folder, url, folder / f"out-{way}")
        faults = client(target, url, questions[:4], given.max_new_tokens)
    found = list(differences(target, told["samples"], rows))
    numbers = [one for one in found if isinstance(one, float)]
    faults += [one for one in found if isinstance(one, str)]
    faults += [f"a log-likelihood is {one:.6f} off" for one in numbers if not one <= given.tolerance]  # NaN neither
    results = {name: {k: v for k, v in told["results"][name].items() if isinstance(v, float)} for name in TASKS}
    return {"results": results, "compared": len(numbers), "largest_difference": max(numbers), "faults": faults}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2-135m")
    parser.add_argument("head", nargs="?")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-lmeval", help="lm-eval's; see make lmeval-venv")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of a log-likelihood")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="all that follows goes to `tercel serve`")
    given = parser.parse_args(arguments)
    if not (given.venv / ".ready").is_file():
        sys.exit(f"lm-eval is not in {given.venv}; run: python engines/make_venv.py lmeval {given.venv}")
    target = load_target(given.target, dtype=parse_dtype(given.dtype))
    questions = [question.turns[0] for question in parse_tasks(DEMO, [])[0].questions][: given.questions]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target.tokenizer.save_pretrained(folder / "tokenizer")
        rows = documents(target, questions, given.max_new_tokens)
        write_tasks(folder, rows, given.max_new_tokens)
        ways = {way: compared(given, target, rows, folder, way) for way in ("eagle3", "vanilla")}
    same = ways["eagle3"]["results"] == ways["vanilla"]["results"]
    for way, found in ways.items():
        print(f"{way}: {found['results']}")
        print(f"{found['compared']} log-likelihoods, at most {found['largest_difference']:.2g} off")
        for fault in found["faults"]:
            print(f"wrong: {fault[:300]}")
    print("the same with and without the head" if same else "NOT the same with and without the head")
    if given.json is not None:
        machine = {"machine": describe(torch.device("cpu")), "target": given.target, "dtype": given.dtype}
        write_json(given.json, {**machine, "ways": ways, "same": same})
    return 0 if same and not any(found["faults"] for found in ways.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
