"""A tiny language model with its tokenizer, and questions for it: so that every experiment runs anywhere in minutes.

It is random, so what it says means nothing; its greedy text repeats enough that a head can learn it. Numbers of this
scale show that the machinery works, and nothing of the paper.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tercel.files import atomic_dir, write_text
from tercel.target_model.gguf import quiet_transformers

START, END, SEED = "<|im_start|>", "<|im_end|>", 5
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'][0] + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>a' }}{% endif %}"
)
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
}


def tiny_target(folder: Path, layers: int = SIZES["num_hidden_layers"]) -> str:
    """The model's folder, made once. layers: fewer for the small model that drafts for the other."""
    if not folder.is_dir():
        tokenizer = _tokenizer()
        sizes = {**SIZES, "num_hidden_layers": layers}
        config = LlamaConfig(
            **sizes,  # type: ignore[arg-type]
            vocab_size=len(tokenizer),
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
            initializer_range=0.25,
            tie_word_embeddings=True,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = LlamaForCausalLM(config).float().eval()
        with quiet_transformers(), atomic_dir(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    return str(folder)


def write_questions(file: Path, count: int, seed: int, turns: int = 1) -> Path:
    """A task, or prompts to learn from: short runs of words from the built-in questions."""
    drawn, words = random.Random(seed), _words()
    rows = (
        {"id": f"{file.stem}-{number}", "turns": [" ".join(drawn.choices(words, k=4)) for _ in range(turns)]}
        for number in range(count)
    )
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    return file


def _tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(ByteLevel.alphabet())
    vocab = {token: place for place, token in enumerate([START, END, *letters])}
    backend = Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = Decoder()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=START, eos_token=END, pad_token=END)
    made.chat_template = TEMPLATE
    return made


def _words() -> Sequence[str]:
    text = (files("tercel.measure") / "demo_prompts.jsonl").read_text("utf-8")
    found = [word for line in text.splitlines() for turn in json.loads(line)["turns"] for word in turn.split()]
    return sorted({word.lower() for word in found if word.isascii() and word.isalpha() and len(word) < 7})
