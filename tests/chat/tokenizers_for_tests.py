"""Small real tokenizers (byte-level BPE) with chat templates in the manner of well-known model families."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Hello there, how are you today? I am fine, thank you. What is two plus two? Four.",
    "user assistant system model\n\n\n\n  the answer is that the quick brown fox jumps over the lazy dog",
]

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_WITHOUT_PROMPT = (  # ignores add_generation_prompt
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN3 = (  # keeps the thoughts of the last answer only
    "{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'assistant' and '</think>' in text and not loop.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1 = (  # the generation prompt opens a thought that the rendering of an answer leaves out
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "<|User|>{{ message['content'] }}"
    "{% else %}<|Assistant|>{{ message['content'].split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
GENERATION = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "[INST] {{ message['content'] }} [/INST]{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
PLAIN_NAMES = (  # no end-of-turn token at all
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}"
    "</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

THINKING_TOOLS = (  # in the manner of Qwen3: the last answer always has a thought, an empty one if none is given
    "{% set asked = namespace(at=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set asked.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% elif message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set thought = message.reasoning_content if message.reasoning_content is string else '' %}"
    "{% if loop.index0 > asked.at and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TOOL_IDS = (  # in the manner of Mistral's: an answer of a tool must say which call, and by which tool
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if not message.tool_call_id or not message.name %}"
    "{{ raise_exception('a tool answer needs the id of its call') }}{% endif %}"
    "<|im_start|>tool {{ message.name }} {{ message.tool_call_id }}\n{{ message.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n"
    "{% if message.thinking %}<think>{{ message.thinking }}</think>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FAMILIES: dict[str, tuple[str | None, str | None, str]] = {  # template, BOS, EOS
    "chatml": (CHATML, None, "<|im_end|>"),
    "chatml-without-prompt": (CHATML_WITHOUT_PROMPT, None, "<|im_end|>"),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "gemma": (GEMMA, "<bos>", "<eos>"),
    "qwen3": (QWEN3, None, "<|im_end|>"),
    "r1": (R1, "<s>", "</s>"),
    "generation": (GENERATION, None, "<|im_end|>"),
    "mistral": (MISTRAL, "<s>", "</s>"),
    "names": (PLAIN_NAMES, None, "<eos>"),
    "tools": (TOOLS, None, "<|im_end|>"),
    "thinking-tools": (THINKING_TOOLS, None, "<|im_end|>"),
    "tool-ids": (TOOL_IDS, None, "<|im_end|>"),
    "base": (None, "<s>", "</s>"),
}
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", 
    "<|eot_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>",
    "<|User|>", "<|Assistant|>",
]  # fmt: skip


# GPT-2's way of splitting makes line ends before a word other tokens than line ends at the end of the text.
LINE_ENDS_TOGETHER = r" ?\w+|\s*[\r\n]+|\s+(?!\S)|\s+|[^\w\s]+"
LIKE_GPT2 = r" ?\w+|\s+(?!\S)|\s+|[^\w\s]+"


@lru_cache(maxsize=2)
def _model(pattern: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "\n\n\n")])
    return tokenizer.to_str()


def make_tokenizer(family: str, pattern: str = LINE_ENDS_TOGETHER) -> PreTrainedTokenizerFast:
    template, bos, eos = FAMILIES[family]
    names = {"bos_token": bos} if bos else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_model(pattern)), eos_token=eos, pad_token="<eos>", **names
    )
    tokenizer.chat_template = template
    return tokenizer
