"""Heads to and from the Hugging Face Hub, under the names its users know."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from tercel.draft import DraftModel, save_head
from tercel.errors import TercelError
from tercel.file_set import MANIFEST
from tercel.heads import resolve_head
from tercel.hub import HubName, require_home
from tercel.interop.card import head_card
from tercel.interop.formats.read import read_head
from tercel.locks import folder_lock


def from_pretrained(name: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> DraftModel:
    """A head by its folder, the name of a target with a shipped head, or `owner/name` on the Hub; in any format.

    Raises `TercelError` if there is none, it cannot be fetched, or it is damaged.
    """
    return read_head(resolve_head(str(name), str(name)), dtype=dtype, device=device)


def save_pretrained(model: DraftModel, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write `model` with its card to `folder`, all of it or nothing; a head of this package gives way.

    Other files there stay, a README.md of the user's too. Raises `TercelError` if another maker's config.json or
    model.safetensors is in the way, another process writes there, or the folder cannot be written.
    """
    path = Path(folder)
    with folder_lock(path):
        save_head(model, path, dtype=dtype, card=head_card(model))
    return path


def push_to_hub(
    model: DraftModel,
    repository: str,
    *,
    data_licence: str = "",
    private: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    message: str = "",
) -> str:
    """Publish `model` with its card as `owner/name` and return the commit's address.

    data_licence: the licence of the training data, for the card, unless the head has it recorded.
    Raises `TercelError` for a name that is none, an unstated licence, or what the Hub refuses.
    """
    on_hub = HubName.parse(repository)
    if on_hub is None or "/" not in on_hub.id or on_hub.revision is not None:
        raise TercelError(f"{repository!r} is not a repository name on the Hub; give owner/name")
    licence = data_licence or model.info.training.data_licence
    if not licence:
        raise TercelError(
            "the licence of the data that the head learned from is not recorded; state it as data-licence, "
            "since it binds those who use the head"
        )
    told = replace(model.info, training=replace(model.info.training, data_licence=licence))
    require_home()
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as scratch:
        folder = save_pretrained(replace(model, info=told), Path(scratch) / "head", dtype=dtype)
        (folder / MANIFEST).unlink()  # of use only where the head is written again
        api = HfApi(library_name="tercel")
        try:
            api.create_repo(on_hub.id, private=private, exist_ok=True)
            done = api.upload_folder(
                repo_id=on_hub.id, folder_path=folder, commit_message=message or "Upload an EAGLE-3 draft head"
            )
        except Exception as error:  # the client raises several unrelated types
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TercelError(
                f"the Hub did not take {repository} ({line}); log in with `hf auth login` and see that you may write "
                "there"
            ) from error
    return str(done.commit_url)
