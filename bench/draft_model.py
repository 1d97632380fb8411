"""A small causal language model of a target's own tokenizer, for speculative sampling with an independent draft (SpS).

    python bench/draft_model.py TARGET DATA OUT [--layers 4] [--steps 200] [--lr 5e-4] [--threads 2]
    tercel bench TARGET --methods vanilla,sps --draft-model OUT

Few published models of one family are small enough to draft for a model of 135 M weights. This one is the target with
only some of its layers, evenly chosen, the first and the last among them, which then learns the target's answers from
the same micro-batches as a head would (`tercel train` with as many steps), token by token: the data's next token,
cross-entropy over what is supervised. It is a checkpoint of the target's own architecture, with its tokenizer.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from recipe import of_steps
from torch import Tensor
from transformers import PreTrainedModel

from tercel import Target
from tercel.chat import TokenizedChat, load_chats
from tercel.errors import TercelError
from tercel.files import atomic_dir, require_free
from tercel.target_model.structure import decoder_layers, decoder_of
from tercel.train.batches import plan_steps, split, usable
from tercel.train.config import TrainConfig

EVERY = 20  # steps between two lines


@dataclass(frozen=True)
class Lessons:
    """chats: those to learn from; held_out: those that are not; plan: optimizer steps, as indices of `chats`."""

    chats: Sequence[TokenizedChat]
    held_out: Sequence[TokenizedChat]
    plan: Sequence[Sequence[Sequence[int]]]

    @classmethod
    def of(cls, target: Target, data: str, config: TrainConfig) -> Lessons:
        chats, _ = load_chats([data], target.tokenizer, max_length=config.max_length)
        longest = min(config.max_length, target.context_length)
        parts = split(usable(chats, longest, target.vocab_size), config.eval_share)
        whole = of_steps(config, chats, config.max_steps)
        return cls(parts.train, parts.held_out, plan_steps([len(chat) for chat in parts.train], whole))


def thinned(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A float32 copy with `count` of the layers. Raises `TercelError` for more layers than there are."""
    before = model.config.num_hidden_layers
    if not 1 <= count <= before:
        raise TercelError(f"the target has {before} layers; --layers {count} cannot be taken of them")
    small = copy.deepcopy(model).float().requires_grad_().train()
    layers = decoder_layers(decoder_of(small), before)
    kept = [round(place) for place in torch.linspace(0, before - 1, count).tolist()]
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(small.config, name, None):
            setattr(small.config, name, [getattr(small.config, name)[layer] for layer in kept])
    small.config.num_hidden_layers = count
    chosen = [layers[layer] for layer in kept]
    del layers[:]
    for place, layer in enumerate(chosen):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):  # where its keys lie in a cache
                module.layer_idx = place
        layers.append(layer)
    return small


def loss_of(model: PreTrainedModel, chats: Sequence[TokenizedChat]) -> Tensor:
    """Mean over the supervised tokens of the chats, one after the other."""
    total, count = torch.zeros(()), 0
    for chat in chats:
        tokens = torch.as_tensor(chat.tokens).long()
        wanted = torch.as_tensor(chat.supervised)[1:]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = decoder_of(model)(input_ids=tokens[None], use_cache=False).last_hidden_state[0, :-1]
            logits = model.get_output_embeddings()(hidden[wanted])
        total = total + F.cross_entropy(logits.float(), tokens[1:][wanted], reduction="sum")
        count += int(wanted.sum())
    return total / max(1, count)


def learn(model: PreTrainedModel, lessons: Lessons, config: TrainConfig) -> Iterator[tuple[int, float]]:
    """Every step's number and loss."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        learning, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
    )
    for number, step in enumerate(lessons.plan):
        whole = 0.0
        for micro in step:
            loss = loss_of(model, [lessons.chats[chat] for chat in micro]) / len(step)
            loss.backward()
            whole += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(learning, config.clip)
        optimizer.param_groups[0]["lr"] = config.learning_rate(number, len(lessons.plan))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield number, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-tokens", type=int, default=TrainConfig().batch_tokens)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    require_free(asked.out)
    target = Target.load(asked.target, dtype=torch.bfloat16)
    config = TrainConfig(lr=asked.lr, max_steps=asked.steps, batch_tokens=asked.batch_tokens)
    model = thinned(target.model, asked.layers)
    lessons = Lessons.of(target, asked.data, config)
    for number, loss in learn(model, lessons, config):
        if number % EVERY == 0 or number + 1 == len(lessons.plan):
            print(f"step {number + 1:,} of {len(lessons.plan):,}: loss {loss:.3f}", flush=True)
    with torch.no_grad():
        print(f"held out: loss {float(loss_of(model, lessons.held_out)):.3f}")
    with atomic_dir(asked.out) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    try:
        main()
    except TercelError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
