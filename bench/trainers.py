"""One trainer's optimizer steps, asked for line by line: what `training.py` starts in each trainer's own environment.

    {"trainer": "tercel", "dtype": "bfloat16", "length": 512, …}  → {"version": …, "settings": {…}}
    {}                                                           → {"seconds": 1.2, "loss": 9.1}

All have the same work: one sequence of random tokens, all of them supervised; its features, its last hidden states and
the target's embeddings and output layer are given; teacher, `S` steps, gradients clipped, AdamW. Each works as its
makers mean it to, but for what needs a GPU: SpecForge's fused loss is plain PyTorch here, speculators attends and loses
"eager". Neither peer keeps float32 weights beside lower ones here, which is to their advantage.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))

from line_protocol import Job, replying

Step = Callable[[], float]
LR, CLIP, BETAS = 1e-4, 0.5, (0.9, 0.95)


class Given:
    """What every trainer is given. tokens `[T]`; features `[T, 3*H]` and last `[T, H]`, the target's; output `[V, H]`,
    its output layer, which is its embeddings too; ids `[W]`, the draft vocabulary."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        self.job, self.dtype = job, getattr(torch, job["dtype"])
        hidden, vocabulary, length = job["hidden_size"], job["vocab_size"], job["length"]
        self.tokens = torch.randint(vocabulary, (length,))
        self.features = torch.randn(length, 3 * hidden).to(self.dtype)
        self.last = torch.randn(length, hidden).to(self.dtype)
        self.output = (0.05 * torch.randn(vocabulary, hidden)).to(self.dtype)
        self.ids = torch.arange(job["draft_vocab_size"]) * (vocabulary // job["draft_vocab_size"])
        self.layers = (2, job["num_layers"] // 2, job["num_layers"] - 3)

    @property
    def t2d(self) -> Tensor:
        return torch.zeros(self.job["vocab_size"], dtype=torch.bool).index_fill_(0, self.ids, True)

    @property
    def d2t(self) -> Tensor:
        return self.ids - torch.arange(len(self.ids))

    def llama(self, **more: Any) -> Any:
        """The decoder layer's settings, for trainers that take a configuration of transformers."""
        from transformers import LlamaConfig

        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        return LlamaConfig(
            **{name: self.job[name] for name in sizes},
            vocab_size=self.job["vocab_size"],
            num_hidden_layers=1,
            max_position_embeddings=8192,
            pad_token_id=0,
            tie_word_embeddings=False,
            **more,
        )


def tercel(given: Given) -> tuple[Step, dict[str, Any]]:
    from tercel.chat.conversation import TokenizedChat
    from tercel.draft import DraftVocabulary, Eagle3Head, HeadConfig
    from tercel.target_model.output import TargetOutput
    from tercel.train.config import TrainConfig
    from tercel.train.learner import Learner

    job = given.job
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    head = Eagle3Head(
        HeadConfig(
            **{name: job[name] for name in names},
            target_hidden_size=job["hidden_size"],
            target_num_layers=job["num_layers"],
            draft_vocab_size=job["draft_vocab_size"],
            feature_layers=given.layers,
            rms_norm_eps=1e-5,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    )
    found = TargetOutput(hidden=given.last[None], layers=tuple(given.features[None].chunk(3, -1)))
    target: Any = SimpleNamespace(
        device=torch.device("cpu"),
        dtype=given.dtype,
        fingerprint="given",
        embed=lambda tokens: nn.functional.embedding(tokens, given.output),
        logits=lambda hidden: nn.functional.linear(hidden, given.output),
        encode=lambda tokens, layers: found,
    )
    config = TrainConfig(ttt_steps=job["steps"], oov="keep", lr=LR, clip=CLIP, batch_tokens=job["length"])
    chat = TokenizedChat.of("given", given.tokens.tolist(), [True] * len(given.tokens))
    vocabulary = DraftVocabulary(given.ids, job["vocab_size"])
    learner = Learner(head, vocabulary, target, [chat], config, [[[0]]])

    def step() -> float:
        learned = learner.gradients(0)
        learner.update(learned.lr)
        return learned.loss

    return step, {"weights": "float32 beside the working ones"}


def specforge(given: Given) -> tuple[Step, dict[str, Any]]:
    loss_module: Any = ModuleType("specforge.core.loss")  # the real one cannot be imported without Triton
    loss_module.LogSoftmaxLoss = SimpleNamespace(apply=plain_loss)
    sys.modules[loss_module.__name__] = loss_module
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    job = given.job
    draft = LlamaForCausalLMEagle3(given.llama(draft_vocab_size=job["draft_vocab_size"]), attention_backend="sdpa")
    draft = draft.to(given.dtype)
    draft.embed_tokens.weight = nn.Parameter(given.output, requires_grad=False)
    draft.t2d.copy_(given.t2d)
    draft.d2t.copy_(given.d2t)
    whole = eagle3.OnlineEagle3Model(draft, length=job["steps"], attention_backend="sdpa")
    tokens, ones = given.tokens[None], torch.ones(1, job["length"], dtype=torch.long)

    def loss() -> Tensor:
        losses = whole(
            input_ids=tokens,
            attention_mask=ones,
            target=None,
            loss_mask=ones[..., None],
            hidden_states=given.features[None],
            target_hidden_for_compact=given.last[None],
            target_head_weight=given.output,
        )[0]
        return sum(0.8**number * one for number, one in enumerate(losses))  # type: ignore[return-value]

    return optimized(draft, loss), {"attention": "sdpa", "loss": "plain PyTorch", "teacher": "compact"}


def plain_loss(logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return -(mask * target * torch.log_softmax(logits.float(), 2)).sum(2).mean()


def speculators(given: Given) -> tuple[Step, dict[str, Any]]:
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    job = given.job
    layer = given.llama()
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=job["draft_vocab_size"])
    draft = Eagle3DraftModel(config)
    draft.load_vocab_mappings(given.t2d, given.d2t)
    draft = draft.to(given.dtype)
    draft.embed_tokens.weight = nn.Parameter(given.output, requires_grad=False)
    draft.verifier_lm_head.weight = nn.Parameter(given.output[given.ids], requires_grad=False)
    nn.init.ones_(draft.verifier_norm.weight)
    nn.init.normal_(draft.lm_head.weight, std=0.02)
    losses = resolve_loss_config("kl_div", "eager")

    def loss() -> Tensor:
        _, value, _ = draft(
            hidden_states=given.features[None],
            input_ids=given.tokens[None],
            document_ids=torch.zeros(1, job["length"], dtype=torch.long),
            loss_mask=torch.ones(1, job["length"], dtype=torch.bool),
            verifier_last_hidden_states=given.last[None],
            ttt_steps=job["steps"],
            ttt_step_loss_decay=0.8,
            loss_config=losses,
        )
        return value

    return optimized(draft, loss), {"attention": "eager", "loss": "kl_div, eager"}


def optimized(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=LR, betas=BETAS, fused=True)

    def step() -> float:
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(learning, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(value.detach())

    return step


TRAINERS = {"tercel": tercel, "specforge": specforge, "speculators": speculators}


def main() -> None:
    say = replying()
    try:
        job = json.loads(sys.stdin.readline())
        torch.set_num_threads(job["threads"])
        step, settings = TRAINERS[job["trainer"]](Given(job))
        say({"version": importlib.metadata.version(job["trainer"]), "settings": settings})
        for _ in sys.stdin:
            began = time.perf_counter()
            loss = step()
            say({"seconds": time.perf_counter() - began, "loss": loss})
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        say({"error": " ".join(str(error).split())[:500] or type(error).__name__})
        sys.exit(1)


if __name__ == "__main__":
    main()
