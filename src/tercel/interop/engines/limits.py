"""What an engine cannot express of a head: refused with the reason and the nearest setting, never approximated."""

from __future__ import annotations

from tercel.draft import DraftVocabulary, HeadConfig
from tercel.errors import TercelError
from tercel.interop.loaders.sglang import RAW_UNLESS_ONE

NAMES = {
    "vllm": "vLLM",
    "speculators": "the speculators format",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "openvino": "OpenVINO",
    "llamacpp": "llama.cpp",
}
# options of a head that an engine's layer lacks (its own source, as the views imitate it)
_LACKS = {
    "vllm": (),
    "speculators": (),
    "sglang": ("norm_before_residual", "attention_bias"),
    "trtllm": ("norm_before_residual",),
    "openvino": ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "attention_bias"),
    "llamacpp": ("norm_output", "fc_norm", "attention_bias"),
}
_OUTPUTS = ("sglang", "trtllm", "openvino")
_THREE_LAYERS = ("openvino", "llamacpp")
_ROPES = ("default", "linear", "dynamic", "llama3", "yarn")
_GGUF_ROPES = ("default", "linear", "llama3")


def engine_ids(engine: str, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Feature layers (inputs) as the engine writes them: as they are, or the outputs of the layers before."""
    return tuple(i - 1 for i in layers) if engine in _OUTPUTS else layers


def ids_mean(engine: str) -> str:
    return "outputs of layers" if engine in _OUTPUTS else "inputs of layers"


def check_expressible(
    engine: str, c: HeadConfig, vocabulary: DraftVocabulary, target_type: str | None = None
) -> tuple[str, ...]:
    """Raises `TercelError` for the first thing about a placed head that `engine` cannot express.

    target_type: the target's `model_type`, None if it is not known. Returns what a user should know although it can be
    expressed.
    """
    if engine not in NAMES:
        raise TercelError(f"there is no export for {engine!r}; choose one of {', '.join(NAMES)}")
    who = NAMES[engine]
    if not c.own_output:
        raise TercelError(
            "the head drafts with its target's output layer, and an export holds a head's own; give it that layer with "
            "`tercel.save_pretrained(tercel.load_draft(HEAD, target), DIR)` in Python, then export DIR"
        )
    for flag in _LACKS[engine]:
        if c.to_dict()[flag]:
            raise TercelError(f"{who} has no {flag}, which this head was trained with; {_instead(engine, flag)}")
    _check_layers(engine, who, c)
    _check_widths(engine, who, c)
    known = _GGUF_ROPES if engine == "llamacpp" else _ROPES
    kind = c.rope_parameters.get("rope_type", "default")
    if kind not in known:
        raise TercelError(
            f"the head's RoPE scaling {kind!r} cannot be written for {who} and checked; {', '.join(known)} can"
        )
    if not vocabulary.pruned and int(vocabulary.d2t.abs().max()) > 0:
        raise TercelError(
            f"the head drafts all {len(vocabulary):,} tokens in another order than the target's; {who} takes such a "
            "head's ids for the target's own, so reorder the rows of lm_head first"
        )
    return _doubts(engine, c, target_type)


def _instead(engine: str, flag: str) -> str:
    able = [name for name, lacks in _LACKS.items() if flag not in lacks and name != engine]
    return f"export it to {' or '.join(able[:2])}, or train a head without it"


def _check_layers(engine: str, who: str, c: HeadConfig) -> None:
    layers = c.feature_layers
    listed = ", ".join(map(str, layers))
    if engine in _THREE_LAYERS and len(layers) != 3:
        raise TercelError(
            f"{who} captures exactly three layers, but this head takes {len(layers)} ({listed}); export it to vllm or "
            "sglang, or train one with three feature-layers"
        )
    if len(set(layers)) != len(layers):
        raise TercelError(f"feature layers {listed} name one twice, which {who} would capture once; train another head")
    if engine != "llamacpp" and list(layers) != sorted(layers):
        raise TercelError(
            f"{who} captures layers in their own order, but fc of this head takes them as {listed}; train a head "
            "whose feature layers ascend, or (with three) export it to llamacpp"
        )
    if engine in ("trtllm", "openvino") and 0 in layers:
        raise TercelError(
            f"{who} captures outputs of layers, so not the input of layer 0; export it to vllm, or train a head that "
            "begins at layer 1 or later"
        )
    if engine == "trtllm" and len(layers) == 1:
        raise TercelError(f"{who} has no fc for a single captured layer; export it to vllm")


def _check_widths(engine: str, who: str, c: HeadConfig) -> None:
    if c.hidden_size % c.num_attention_heads:
        raise TercelError(
            f"{who} reads the head as a Llama layer, whose width {c.hidden_size} its {c.num_attention_heads} heads "
            "must divide; train a head of another shape"
        )
    narrower = c.hidden_size != c.target_hidden_size
    if narrower and engine in ("speculators", "openvino"):
        raise TercelError(
            f"{who} has no head of another width ({c.hidden_size}) than its target ({c.target_hidden_size}); export it "
            "to vllm or sglang"
        )
    if c.own_embeddings and not narrower and engine in ("sglang", "trtllm", "openvino"):
        raise TercelError(
            f"{who} puts the target's embeddings in place of the head's own where both have one width; export it to "
            "vllm or speculators"
        )
    if engine in ("sglang", "trtllm") and len(c.feature_layers) * c.target_hidden_size == c.hidden_size:
        raise TercelError(f"{who} leaves fc out where all captured layers are as wide as the head; export it to vllm")


def _doubts(engine: str, c: HeadConfig, target_type: str | None) -> tuple[str, ...]:
    doubts = []
    if engine == "sglang" and c.feature_layers[0] != 2:
        if target_type in RAW_UNLESS_ONE:
            raise TercelError(
                f"SGLang takes the layer ids of a {target_type} target for outputs only if the first one is 1, so that "
                f"inputs {', '.join(map(str, c.feature_layers))} cannot be written; train with feature layer 2 first, "
                "or export it to vllm"
            )
        doubts.append(
            "SGLang's models differ on ids whose first is not 1: Llama and Qwen targets add 1, as written here; "
            "DeepSeek and GLM-4-lite targets would capture one layer too early"
        )
    if engine == "trtllm" and (c.fc_norm or c.norm_output):
        doubts.append("fc_norm and norm_output are read by TensorRT-LLM 1.4; releases without them ignore the flags")
    return tuple(doubts)
