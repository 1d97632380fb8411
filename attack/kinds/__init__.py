"""What is attacked, a file a kind."""

from __future__ import annotations

from attack.inputs import Kind
from attack.kinds import (
    arguments,
    conversations,
    escapes,
    gguf,
    heads,
    outputs,
    runs,
    servers,
    settings,
    surroundings,
    targets,
    tokenizers,
    tuning,
)

KINDS: tuple[Kind, ...] = tuple(
    module.KIND
    for module in (
        heads,
        targets,
        tokenizers,
        gguf,
        conversations,
        arguments,
        outputs,
        settings,
        servers,
        tuning,
        escapes,
        runs,
        surroundings,
    )
)
