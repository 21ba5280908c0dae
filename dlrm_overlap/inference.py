"""Export of a checkpoint for inference: a program of `torch.export` that loads in a process with torch alone.

The program maps the features of a batch to click probabilities, in float32, on one device. Beside it lies a JSON file
with the names, types and shapes of its inputs and output. docs/serving.md shows how to use both.

No table is held in memory while it is exported. A table that the checkpoint keeps in one piece is the mapped file
itself; one that is put together of pieces, or quantised, is made chunk by chunk in a mapped file beside the output,
which is removed at the end. `torch.export.save` then copies one tensor at a time.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding_bag, pad

from dlrm_overlap.config import InputError, ModelConfig
from dlrm_overlap.data.batch import table_keys
from dlrm_overlap.files import replacing, write_json
from dlrm_overlap.model import DLRM
from dlrm_overlap.storage.load import open_checkpoint
from dlrm_overlap.storage.manifest import Manifest, read_manifest
from dlrm_overlap.storage.parts import Part, Stored, fill
from dlrm_overlap.storage.tools import verify

QUANTIZE = ("none", "int8")
_CHUNK_ELEMENTS = 1 << 22  # of a table, that are read, or quantised, at a time
_EXAMPLE_BATCH, _EXAMPLE_IDS = 5, 7  # of the batch that is traced; any other number of either will do later


class FloatTable(nn.Module):
    """Sums of the rows of a float32 table."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Take `weight` [rows, D] float32."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Map the ids [n] of b bags, the i-th from offsets[i] to offsets[i + 1], to pooled embeddings [b, D]."""
        return embedding_bag(ids, self.weight, offsets, mode="sum", include_last_offset=True)


class NarrowTable(nn.Module):
    """Sums, in float32, of the rows of a float16 table."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Take `weight` [rows, D] float16."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Do what `FloatTable.forward` does."""
        return _pool(self.weight.index_select(0, ids).float(), offsets)


class Int8Table(nn.Module):
    """Sums, in float32, of rows of 8 bits a weight.

    As in FBGEMM's row-wise quantisation, a row has a scale and an offset of its own: weight = code * scale + least.

    Example: the row [-1.0, 0.0, 4.1] has scale 5.1 / 255 = 0.02 and least -1.0, so its codes are [0, 50, 255].
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Take `codes` [rows, D] uint8 and `scales` [rows, 2] float32, each (scale, least weight) of a row."""
        super().__init__()
        self.codes: torch.Tensor
        self.scales: torch.Tensor
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Do what `FloatTable.forward` does."""
        scale, least = self.scales.index_select(0, ids).split(1, dim=1)
        return _pool(self.codes.index_select(0, ids).float() * scale + least, offsets)


def _pool(rows_nD: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(rows_nD.shape[0], device=rows_nD.device)
    return embedding_bag(positions, rows_nD, offsets, mode="sum", include_last_offset=True)


class InferenceModel(nn.Module):
    """A DLRM on one device, from ids to probabilities: what is exported."""

    def __init__(self, tables: Sequence[nn.Module], dlrm: DLRM) -> None:
        """Take a lookup for each table, and the dense part of `dlrm`."""
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.bottom, self.head = dlrm.bottom, dlrm.head
        self.requires_grad_(False)

    def forward(self, dense: torch.Tensor, values: list[torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
        """Return the probability [b] float32 of a click, for inputs as `logits` takes them."""
        return self.logits(dense, values, lengths).sigmoid()

    def logits(self, dense: torch.Tensor, values: list[torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
        """Return the logits [b] float32.

        Args:
            dense: [b, F] float32.
            values: of each table, the ids [n_t] int64 of all bags, one sample's after another's.
            lengths: [T, b] int64, how many of them each bag has.
        """
        offsets = pad(lengths.cumsum(1), (1, 0))
        pooled = [table(ids, offsets[t]) for t, (table, ids) in enumerate(zip(self.tables, values, strict=True))]
        return self.head(self.bottom(dense), torch.cat(pooled, dim=1))


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


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `Int8Table` takes for the rows `weight` [rows, D]: codes and scales.

    A row whose weights are all alike has the scale 0 and is exact.
    """
    weight = weight.float()
    least, most = weight.aminmax(dim=1, keepdim=True)
    scale = (most - least) / 255
    codes = ((weight - least) / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(0, 255)
    return codes.to(torch.uint8), torch.cat((scale, least), dim=1)


@dataclass
class Squares:
    """Sums over all weights that were quantised."""

    of_errors: float = 0.0
    of_weights: float = 0.0

    def add(self, errors: torch.Tensor, weights: torch.Tensor) -> None:
        """Add those of some rows."""
        self.of_errors += errors.double().square().sum().item()
        self.of_weights += weights.double().square().sum().item()

    @property
    def relative_rms_error(self) -> float:
        """Root of the mean square error over that of the mean square weight."""
        return math.sqrt(self.of_errors / self.of_weights) if self.of_weights else 0.0


def build_for_inference(
    path: Path, manifest: Manifest, quantize: str, scratch: Scratch
) -> tuple[InferenceModel, Squares]:
    """Return the model of the checkpoint `path`, which is whole, on the CPU, and what quantising has cost.

    Args:
        path: of the checkpoint.
        manifest: of the checkpoint.
        quantize: none or int8.
        scratch: for tables that are not a piece of one of the checkpoint's files.

    Raises:
        InputError: if the checkpoint does not tell its model, or lacks a tensor of it.
        OSError: if there is no room for a table.
    """
    stored = open_checkpoint(path, manifest)
    model, rows = dict(manifest.shape.get("model", {})), manifest.shape.get("rows", [])
    if not model or not rows:
        raise InputError(f"export: {path} does not tell of which model it is; export its tensors alone")
    dense_features = model.pop("dense_features")
    with torch.random.fork_rng(devices=[]):
        dlrm = DLRM(ModelConfig(**model), rows, dense_features, "fp32")
    for name, parameter in dlrm.named_parameters():
        if not name.startswith("embedding."):
            _read(f"model.dlrm.{name}", parameter.data, stored)
    squares, tables = Squares(), []
    for key, count in zip(dlrm.keys, rows, strict=True):
        name, shape = f"model.dlrm.embedding.embedding_bags.{key}.weight", (count, dlrm.dim)
        if quantize == "int8":
            step = count if manifest.format == 0 else max(1, _CHUNK_ELEMENTS // dlrm.dim)  # 0: a read is of all rows
            tables.append(_quantised(name, shape, step, stored, scratch, squares))
        else:
            weight = _table(name, shape, stored, scratch)
            tables.append((FloatTable if weight.dtype == torch.float32 else NarrowTable)(weight))
    return InferenceModel(tables, dlrm).eval(), squares


def _read(name: str, into: torch.Tensor, stored: Stored, shape: Sequence[int] = (), first_row: int = 0) -> None:
    """Copy the tensor `name`, or, of one of `shape`, the rows from `first_row` on, into `into`."""
    offsets = (first_row, *(0 for _ in into.shape[1:]))
    fill(Part(name, tuple(shape or into.shape), offsets, tuple(into.shape), into), stored)


def _table(name: str, shape: tuple[int, int], stored: Stored, scratch: Scratch) -> torch.Tensor:
    """Return a table [rows, D]: a view of the checkpoint's file where it lies there in one piece."""
    source = stored.tensors.get(name)
    pieces = source.pieces if source and source.shape == shape else ()
    first = stored.read(pieces[0]) if pieces else torch.empty(0)
    if len(pieces) == 1:
        return first
    weight = scratch.empty(shape, first.dtype)
    _read(name, weight, stored)
    return weight


def _quantised(
    name: str, shape: tuple[int, int], step: int, stored: Stored, scratch: Scratch, squares: Squares
) -> Int8Table:
    """Return the table `name` in 8 bits, `step` rows of which are read at a time."""
    rows, dim = shape
    table = Int8Table(scratch.empty(shape, torch.uint8), scratch.empty((rows, 2), torch.float32))
    for first in range(0, rows, step):
        weight = torch.empty(min(step, rows - first), dim)
        _read(name, weight, stored, shape, first)
        here = slice(first, first + len(weight))
        table.codes[here], table.scales[here] = codes, scales = quantise_rows(weight)
        squares.add(codes * scales[:, :1] + scales[:, 1:] - weight, weight)
    return table


def trace(model: InferenceModel, dense_features: int) -> torch.export.ExportedProgram:
    """Return `model` as a program for batches of any number of samples and ids."""
    tables, batch = len(model.tables), torch.export.Dim("batch")
    example = (
        torch.zeros(_EXAMPLE_BATCH, dense_features),
        [torch.zeros(_EXAMPLE_IDS, dtype=torch.int64) for _ in range(tables)],
        torch.ones(tables, _EXAMPLE_BATCH, dtype=torch.int64),
    )
    sizes = {
        "dense": {0: batch},
        "values": [{0: torch.export.Dim(f"ids_{t}")} for t in range(tables)],
        "lengths": {1: batch},
    }
    return torch.export.export(model, example, dynamic_shapes=sizes)


def export_for_inference(path: Path, output: Path, quantize: str = "none") -> dict[str, Any]:
    """Write the checkpoint `path` as a program for inference to `output`, and its signature beside it.

    Args:
        path: of the checkpoint, whose files are checked first.
        output: a new file that ends in .pt2; the signature has the same name with .json.
        quantize: none keeps the type of the tables; int8 gives them 8 bits a weight, a scale and an offset a row.

    Returns:
        The signature.

    Raises:
        InputError: if the checkpoint is not whole, or a file cannot be written or is there.
    """
    beside = output.with_suffix(".json")
    if output.suffix != ".pt2":
        raise InputError(f"export: {output} must end in .pt2, as programs of torch.export do")
    for file in (output, beside):
        if file.exists():
            raise InputError(f"export: {file} is there already; name a new file")
    if faults := verify(path):
        raise InputError(f"export: {faults[0]}; export another checkpoint")
    manifest = read_manifest(path)
    try:
        with TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
            model, squares = build_for_inference(path, manifest, quantize, Scratch(Path(folder)))
            signature = _signature(model, manifest, output.name, quantize, squares)
            program = trace(model, manifest.shape["model"]["dense_features"])
            with replacing(output) as stream:
                torch.export.save(program, stream)
        write_json(beside, signature, "export")
    except OSError as error:
        raise InputError(f"export: {output} cannot be written ({error.strerror}); name another file") from None
    return signature


def _signature(model: InferenceModel, manifest: Manifest, name: str, quantize: str, squares: Squares) -> dict[str, Any]:
    rows = manifest.shape["rows"]
    features = manifest.shape["model"]["dense_features"]
    tables = {key: {"rows": count} for key, count in zip(table_keys(len(rows)), rows, strict=True)}
    cost = {} if quantize == "none" else {"relative_rms_error_of_weights": squares.relative_rms_error}
    return {
        "program": name,
        "torch": torch.__version__,
        "step": manifest.step,
        "inputs": {
            "dense": {"dtype": "float32", "shape": ["batch", features]},
            "values": [{"table": key, "dtype": "int64", "shape": ["ids"]} for key in tables],
            "lengths": {"dtype": "int64", "shape": [len(rows), "batch"]},
        },
        "outputs": {"probability": {"dtype": "float32", "shape": ["batch"]}},
        "tables": tables,
        "quantize": quantize,
        **cost,
        "bytes": sum(tensor.nbytes for tensor in model.state_dict().values()),
    }
