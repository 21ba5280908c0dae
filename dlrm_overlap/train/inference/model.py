"""The model that is exported, put together from the files of a checkpoint.

No table is held in memory: each is made in a mapped file of its own.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import embedding_bag, pad

from dlrm_overlap.checkpoint.extents import Extent
from dlrm_overlap.checkpoint.manifest import Manifest
from dlrm_overlap.checkpoint.storage import load_extents, stored_dtypes
from dlrm_overlap.config import ModelConfig, SequenceConfig
from dlrm_overlap.train.model import DLRM


class Table(nn.Module):
    """Sums, in float32, of the rows of a table, in PyTorch's own operators, so that they can be exported."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Take `weight` [rows, D] float32 or float16."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Map the ids [n] of b bags, the i-th from offsets[i] to offsets[i + 1], to pooled embeddings [b, D]."""
        ids_or_rows, rows = ids, self.weight
        if rows.dtype != torch.float32:
            ids_or_rows, rows = torch.arange(ids.shape[0], device=ids.device), rows.index_select(0, ids).float()
        return embedding_bag(ids_or_rows, rows, offsets, mode="sum", include_last_offset=True)


class InferenceModel(nn.Module):
    """A DLRM on one device, from ids to probabilities, as it is exported."""

    def __init__(self, tables: Sequence[nn.Module], dlrm: DLRM) -> None:
        """Take a lookup for each table, and the dense part of `dlrm`."""
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.bottom, self.head = dlrm.bottom, dlrm.head
        self.history = self.candidate = None
        """numbers of the tables of histories and of candidates; None where all tables are pooled"""
        if dlrm.history_key is not None:
            self.history, self.candidate = dlrm.keys.index(dlrm.history_key), dlrm.keys.index(dlrm.candidate_key)
            self.attention = dlrm.attention
        self.requires_grad_(False)

    def forward(self, dense: torch.Tensor, values: list[torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
        """Return the probabilities [b] or [b, L] float32 of a click, for inputs as `logits` takes them."""
        return self.logits(dense, values, lengths).sigmoid()

    def logits(self, dense: torch.Tensor, values: list[torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
        """Return the logits [b] float32, or [b, L].

        Args:
            dense: [b, F] float32.
            values: of each table, the ids [n_t] int64 of all bags, one sample's after another's.
            lengths: [T, b] int64, how many of them each bag has.
        """
        offsets, front = pad(lengths.cumsum(1), (1, 0)), self.bottom(dense)
        looked_up = []
        for t, (table, ids) in enumerate(zip(self.tables, values, strict=True)):
            bags = offsets[t]
            if t == self.history:  # bags of one id each, then an empty one, so that there is a row in any case
                bags = torch.arange(ids.shape[0] + 2, device=ids.device).clamp(max=ids.shape[0])
            looked_up.append(table(ids, bags))
        if self.history is not None and self.candidate is not None:
            found = self.attention(looked_up[self.candidate], looked_up.pop(self.history), lengths[self.history])
            front = torch.cat((front, found), dim=1)
        return self.head(front, torch.cat(looked_up, dim=1))


class Scratch:
    """Tensors in files of a folder, to which the kernel writes them back where memory is short."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of `shape`, of no particular elements.

        Raises:
            OSError: if there is no room on the disk.
        """
        path = self._folder / str(self._count)
        self._count += 1
        elements = math.prod(shape)
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, elements * dtype.itemsize)  # a full disk would else be a SIGBUS later
        return torch.from_file(str(path), shared=True, size=elements, dtype=dtype).view(*shape)


def build_for_inference(path: Path, manifest: Manifest, scratch: Scratch) -> InferenceModel:
    """Return the model of the checkpoint `path`, which is whole, on the CPU.

    Args:
        path: of the checkpoint.
        manifest: of the checkpoint.
        scratch: for the tables.

    Raises:
        InputError: if the checkpoint lacks a tensor of its model.
        OSError: if there is no room for a table.
    """
    rows = manifest.shape["rows"]
    model = {key[6:]: value for key, value in manifest.shape.items() if key.startswith("model.")}
    dense_features = model.pop("dense_features")
    sequence = {key: model.pop(f"sequence.{key}") for key in vars(SequenceConfig()) if f"sequence.{key}" in model}
    with torch.random.fork_rng(devices=[]):
        dlrm = DLRM(ModelConfig(**model, sequence=SequenceConfig(**sequence)), rows, dense_features, "fp32")
    dtypes = stored_dtypes(path)
    into = {f"dlrm.{name}": each.data for name, each in dlrm.named_parameters() if not each.is_meta}
    tables = []
    for key, count in zip(dlrm.keys, rows, strict=True):
        place = "history.embeddings" if key == dlrm.history_key else "embedding.embedding_bags"
        name = f"dlrm.{place}.{key}.weight"
        into[name] = scratch.empty((count, dlrm.dim), dtypes.get(f"model.{name}", torch.float32))
        tables.append(Table(into[name]))
    extents = [Extent(("model", name), tuple(each.shape), (0,) * each.dim(), each) for name, each in into.items()]
    load_extents(path, extents)
    return InferenceModel(tables, dlrm).eval()
