"""What an engine would make of a head's folder as it lies there, before it is started with it."""

from __future__ import annotations

from pathlib import Path

from tercel.draft import DraftModel
from tercel.errors import TercelError
from tercel.interop.engines import ServingEngine
from tercel.interop.proof import compare

# what an engine's own code, imitated, raises at settings that nobody has checked
_UNUSABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def misread_by(engine: ServingEngine, model: DraftModel, folder: Path, target_type: str | None) -> str | None:
    """Why `engine` would not load the head in `folder` as `model`, which was read from it; None if it would.

    target_type: the target's `model_type`, which some engines go by.
    """
    depth = model.head.config.target_num_layers
    if depth is None:
        return "it is not known how many layers its target has, so nothing could be checked"
    if (reason := engine.unstartable(folder)) is not None:
        return reason
    try:
        compare(model, engine.view(folder, depth, target_type))
    except TercelError as error:
        return str(error)
    except _UNUSABLE as error:
        return f"{engine.title} would stop at a setting of another kind than it takes ({error})"
    return None
