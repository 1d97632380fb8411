"""What there is to say of an engine: its ids, its limits, the files it wants and how it is started.

Nothing here needs torch before a head is written or read back, so that the command line can ask what engines there are.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tercel.errors import TercelError
from tercel.file_set import CONFIG
from tercel.files import as_json, put_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tercel.draft import DraftModel, DraftVocabulary, HeadConfig
    from tercel.draft.shape import TreeShape
    from tercel.interop.loaders import EngineView

_HOST = re.compile(r"[A-Za-z0-9._:-]+")


@dataclass(frozen=True)
class ExportJob:
    """One head to be written. model: placed and expressible; out: where the folder will stand in the end; dtype: of
    its matrices; target_name, target_gguf, architectures: the target by name, its GGUF file, and what its `config.json`
    calls it; embeddings_learn: whether the head's own were trained with it."""

    model: DraftModel
    out: Path
    dtype: torch.dtype
    target_name: str
    target_gguf: Path | None
    architectures: tuple[str, ...]
    shape: TreeShape
    embeddings_learn: bool


@dataclass(frozen=True)
class Layout:
    """How a target is spread over GPUs: every layer over `tensor` of them, the layers over `pipeline` times as many,
    and all that `data` times; on `nodes` machines, the first of which the others reach at `address`.

    Raises `TercelError` if the GPUs are not as many on every machine, or if machines have no way to each other.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    nodes: int = 1
    address: str | None = None

    def __post_init__(self) -> None:
        if self.gpus % self.nodes:
            raise TercelError(
                f"{self.tensor} x {self.pipeline} x {self.data} GPUs are not as many on each of {self.nodes} machines; "
                "give sizes whose product they divide"
            )
        if self.nodes > 1 and not _HOST.fullmatch(self.address or ""):
            raise TercelError("several machines have to find the first; give its address, a name or an IP address")

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data


class ServingEngine(ABC):
    """An engine, or a format of its own that an engine takes: one object each, in the engine's module.

    name: as `--to` and `--engine` take it. title: as sentences say it. run_by: name of the engine that runs it.

    Limits, which `limits.check_expressible` turns into refusals:
    lacks: options of a head that its layer does not have. ropes: scalings that it takes and that can be checked.
    ids_are_outputs: layer ids in its files count outputs of layers, not inputs. first_layer: the lowest input that it
    can capture. sorts_layers: it captures in the order of the layers, whatever the order of the list. captures: how
    many layers, where that is fixed. single_layer: it builds `fc` for one layer too. wide_fc: it builds `fc` even where
    the captured layers together are as wide as the head. other_widths: a head may be of another width than its target.
    own_embeddings: a head as wide as its target may have embeddings of its own. deep: a head may have more decoder
    layers than one.

    How it runs:
    takes_gguf: target and draft are GGUF files. names_target: the folder itself says what its target is. drafts_trees:
    not only chains. serve_command: one line starts it with a folder and a target, so that `tercel serve-command` offers
    it. tells_counters: its server tells what was accepted, so that `tercel doctor` can ask it (`doctor/clients`). port:
    where that server listens unless told otherwise. image: of containers with it; None if no lines are written for
    them. entry: words of its line that the image says by itself.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    lacks: ClassVar[tuple[str, ...]] = ()
    ropes: ClassVar[tuple[str, ...]] = ("default", "linear", "dynamic", "llama3", "yarn")
    ids_are_outputs: ClassVar[bool] = False
    first_layer: ClassVar[int] = 0
    sorts_layers: ClassVar[bool] = True
    captures: ClassVar[int | None] = None
    single_layer: ClassVar[bool] = True
    wide_fc: ClassVar[bool] = True
    other_widths: ClassVar[bool] = True
    own_embeddings: ClassVar[bool] = True
    deep: ClassVar[bool] = False

    takes_gguf: ClassVar[bool] = False
    names_target: ClassVar[bool] = False
    drafts_trees: ClassVar[bool] = False
    serve_command: ClassVar[bool] = False
    tells_counters: ClassVar[bool] = False
    port: ClassVar[int] = 8000
    image: ClassVar[str | None] = None
    entry: ClassVar[int] = 0

    @property
    def run_by(self) -> str:
        return self.name

    @property
    def ids_mean(self) -> str:
        return "outputs of layers" if self.ids_are_outputs else "inputs of layers"

    def ids(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Feature layers (inputs) as its files have them: as they are, or the outputs of the layers before."""
        return tuple(i - 1 for i in layers) if self.ids_are_outputs else layers

    def unwritable_ids(self, layers: tuple[int, ...], target_type: str | None) -> str | None:
        """Why no ids mean these layers for a target of this `model_type`, and what to train instead; None if some
        do."""
        return None

    def doubts(self, c: HeadConfig, target_type: str | None) -> tuple[str, ...]:
        """What a user should know of a head although it can be expressed."""
        return ()

    def loads_as_target(self, target_name: str, target_gguf: Path | None) -> str:
        """What it is given as the target. Raises `TercelError` if that was not named."""
        return target_name

    @abstractmethod
    def write(self, job: ExportJob, folder: Path) -> None:
        """All that it wants, into `folder`. Raises `TercelError` if a file cannot be written."""

    @abstractmethod
    def launch(self, head: str, target: str, shape: TreeShape, dtype: str = "bfloat16") -> str:
        """The whole of what starts it with the exported folder `head`, which is quoted here."""

    def spread(self, layout: Layout, node: int) -> list[str]:
        """What is added to the line on machine `node` so that the target is spread. Raises `TercelError` for what the
        engine does not do with a head."""
        if layout == Layout():
            return []
        raise TercelError(f"how {self.title} spreads a target over GPUs is not written here; see its own documentation")

    def start(self, out: Path, target: str, shape: TreeShape) -> str:
        """The launch line for an export that stands in `out`."""
        return self.launch(str(out), target, shape)

    def beside_launch(self, job: ExportJob) -> str | None:
        """Markdown for the export's README: what there is to know beside the launch line."""
        return None

    def unstartable(self, folder: Path) -> str | None:
        """Why it cannot even be started with `folder`; None if it can."""
        return None

    @abstractmethod
    def view(self, folder: Path, num_layers: int, target_type: str | None = None) -> EngineView:
        """`folder` as its loader would read it for a target of `num_layers` layers and this `model_type`.

        Raises `TercelError`, with the engine's reason, where the engine itself would stop.
        """


class FolderEngine(ServingEngine):
    """An engine that reads `config.json` and safetensors.

    keeps_names: tensors are named as in this package's own checkpoint, so that `tercel.json` still fits beside them.
    """

    keeps_names: ClassVar[bool] = True

    def write(self, job: ExportJob, folder: Path) -> None:
        """Weights, `config.json` and `more_files`, with this package's own record where that fits."""
        from tercel.draft.eagle3 import public_config
        from tercel.interop.engines.weights import write_own_file, write_weights

        c = job.model.head.config
        write_weights(job.model, self, folder, job.dtype)
        config = self.config(public_config(c, job.dtype), c, job)
        put_text(folder / CONFIG, as_json(config))
        if self.keeps_names:
            write_own_file(job.model, folder)
        for name, text in self.more_files(c, job).items():
            put_text(folder / name, text)

    @abstractmethod
    def config(self, public: dict[str, Any], c: HeadConfig, job: ExportJob) -> dict[str, Any]:
        """Its `config.json`, made from the `public` one of the head `c`: every default that engines disagree on is
        written out, ids in this engine's sense."""

    def tensor_name(self, name: str) -> str:
        """What its loader calls a tensor of the head."""
        return name

    def maps(self, vocabulary: DraftVocabulary) -> dict[str, Tensor]:
        """The vocabulary's tensors that it reads, and none that it would stop at."""
        return {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d} if vocabulary.pruned else {}

    def more_files(self, c: HeadConfig, job: ExportJob) -> dict[str, str]:
        """Texts, by file name, that it wants beside configuration and weights."""
        return {}


def plain_config(public: dict[str, Any], c: HeadConfig) -> dict[str, Any]:
    """What the engines that read a Llama configuration share, but for `eagle_config`."""
    config = {**public, "num_aux_hidden_states": c.num_features}
    config.pop("eagle_config", None)
    return config


def eagle_config(c: HeadConfig) -> dict[str, Any]:
    return {"use_aux_hidden_state": True, "norm_before_fc": c.norm_before_fc}
