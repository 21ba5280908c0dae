"""The files of a delta: the weights that training has changed since a checkpoint or another delta.

`delta_<step>` gets this name once it is complete, and has
    manifest.json           as a checkpoint's, and what the delta follows
    tables_rank<R>.parquet  changed rows of rank R's shards; a row group has rows of one table, source and column
    .metadata, *.distcp     the dense parameters, in a checkpoint's format

For a table of any id, an `update` row has an id and the row that it now has, and replaces the row's former id. An
`evict` row, a tombstone, has an id that lost its row, and that row.

Imports neither TorchRec nor, before a delta's rows are read or written, pyarrow.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dlrm_overlap.checkpoint.manifest import (
    APPLIED,
    Manifest,
    check_sizes,
    is_state,
    may_exist,
    read_manifest_file,
)
from dlrm_overlap.checkpoint.pieces import CheckedFile, ChecksummedFile, DamagedError, Piece
from dlrm_overlap.checkpoint.storage import read_weights
from dlrm_overlap.config import Config, InputError, in_one_line
from dlrm_overlap.launching import supported_versions

KEY = "checkpoint.delta_every"
DELTA_MANIFEST = "manifest.json"
UPDATE, EVICT = "update", "evict"
INT8 = "int8"
_NAME = re.compile(r"delta_(\d+)")
_TABLES = re.compile(r"tables_rank(\d+)\.parquet")
_GROUP_BYTES = 1 << 26  # of embeddings in a row group
_LEVELS = 255  # of a byte, above the least


@dataclass(frozen=True)
class DeltaManifest(Manifest):
    base: dict[str, Any] = field(default_factory=dict)
    """what the delta follows: `step`; `digest` of the manifest of the checkpoint or delta of that step; `same`, the
    digests of other manifests of the same weights: if a checkpoint and a delta were written after one step, the
    checkpoint's is `digest`"""

    def follows(self, state: dict[str, Any]) -> bool:
        """Return whether the delta can be applied to `state`, which has the fields of `base`."""
        digests = {self.base["digest"], *self.base["same"]}
        return self.base["step"] == state["step"] and not digests.isdisjoint([state["digest"], *state["same"]])


class ChangedRows(NamedTuple):
    """Rows of a table's shard that changed, or ids that lost their rows."""

    table: str
    """name of the table's weight in the model's state dict"""
    feature: str
    """feature that looks up the table"""
    source: str
    """UPDATE or EVICT"""
    column: int
    """first column of `values` in the table, which may be cut by columns"""
    keys: torch.Tensor
    """[n] int64: the row, or the id of a table of any id"""
    rows: torch.Tensor
    """[n] int64: the row in the whole table"""
    values: torch.Tensor | None
    """[n, D] of a float type; None for EVICT"""


def check_pyarrow() -> None:
    try:
        supported_versions.check_pyarrow()
    except InputError as error:
        raise InputError(f"{KEY}: deltas need pyarrow; {error}") from None


def check_deltas(config: Config) -> None:
    """Raise an InputError if a run of `config` cannot write the deltas that it asks for; needs no process group."""
    if config.checkpoint.delta_every:
        check_pyarrow()
        check_backend(config.embedding.backend)


def check_backend(backend: str) -> None:
    if backend in ("torchrec", "nccl"):
        raise InputError(
            f"{KEY}: backend {backend} updates rows by FBGEMM, which does not tell which rows it changes; take "
            f"--embedding.backend pgas or fused, or 0 for no deltas"
        )


def delta_name(step: int) -> str:
    return f"delta_{step}"


def deltas_in(folder: Path) -> dict[int, Path]:
    """Return step -> delta for `folder`, in the order of steps."""
    found = {int(match[1]): each for each in folder.glob("delta_*") if (match := _NAME.fullmatch(each.name))}
    return dict(sorted(found.items()))


def read_delta_manifest(path: Path) -> DeltaManifest:
    """Return the manifest of the delta `path`; raises as `read_manifest` does."""
    manifest = read_manifest_file(path / DELTA_MANIFEST, DeltaManifest)
    try:
        is_right = is_state(manifest.base)
    except (KeyError, TypeError, AttributeError):
        is_right = False
    if not is_right:
        raise DamagedError(f"{path / DELTA_MANIFEST} is damaged (base has the wrong type)")
    return manifest


def read_delta(path: Path) -> DeltaManifest:
    """Return the manifest of the delta `path` after checking that its files are there.

    Raises:
        DamagedError: if a file is missing or has another size, or the manifest has been changed.
        InputError: if `path` is no delta.
    """
    if not may_exist(path / DELTA_MANIFEST):
        raise InputError(
            f"delta: {path / DELTA_MANIFEST} is missing, so {path} is not a delta; give a folder delta_<N>, from the "
            f"folder deltas of a run"
        )
    manifest = read_delta_manifest(path)
    check_sizes(path, manifest)
    return manifest


def state_of_delta(manifest: DeltaManifest) -> dict[str, Any]:
    """Return what the next delta may follow: see `DeltaManifest.base`."""
    return {"step": manifest.step, "digest": manifest.digest, "same": []}


def state_of_checkpoint(manifest: Manifest) -> dict[str, Any]:
    """Return what the next delta may follow: the checkpoint or, if `delta apply` wrote it, its last delta."""
    same = []
    if (applied := manifest.about.get(APPLIED)) is not None:
        same = [applied["digest"], *applied["same"]]
    return {"step": manifest.step, "digest": manifest.digest, "same": same}


def read_dense(path: Path, manifest: DeltaManifest) -> dict[str, torch.Tensor]:
    """Return the dense parameters of a delta by their names in the model's state dict."""
    return read_weights(path, manifest)


def read_changes(path: Path, manifest: DeltaManifest) -> Iterator[ChangedRows]:
    """Yield the changed rows of a delta, whose values are float32, in no particular order.

    Every byte is checked before it is used; the last checks come at the end.

    Raises:
        DamagedError: if a file is damaged.
        ModuleNotFoundError: without pyarrow.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in filter(_TABLES.fullmatch, manifest.files):
        with CheckedFile(path / name, 0, manifest.files[name]) as file:
            try:
                with pa.PythonFile(file, mode="r") as source:
                    parquet = pq.ParquetFile(source)
                    for group in range(parquet.num_row_groups):
                        yield _changes(parquet.read_row_group(group))
            except InputError:
                raise
            except (pa.ArrowException, OSError, KeyError, ValueError) as error:
                text = f"{type(error).__name__}: {in_one_line(error):.120}"
                raise file.fault or DamagedError(f"{path / name} is damaged ({text})") from None


def _changes(group: Any) -> ChangedRows:
    """Return the content of a row group, a pyarrow table."""

    def only(name: str) -> Any:
        found = group[name].unique().to_pylist()
        if len(found) != 1:
            raise ValueError(f"{len(found)} values of {name} in a row group")
        return found[0]

    def numbers(name: str) -> torch.Tensor:
        return torch.from_numpy(group[name].combine_chunks().to_numpy(zero_copy_only=False).copy())

    source, values = only("source"), None
    if source == UPDATE:
        elements = group["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        values = torch.from_numpy(elements.copy()).view(group.num_rows, -1)
        if "scale" in group.column_names:
            values = values * numbers("scale")[:, None] + numbers("bias")[:, None]
    table, feature, column = only("table_fqn"), only("feature_name"), only("column")
    return ChangedRows(table, feature, source, column, numbers("key_id"), numbers("row"), values)


def write_changes(
    file: Path, changes: Iterable[ChangedRows], step: int, rank: int, world_size: int, dtype: str
) -> list[Piece]:
    """Write a rank's changed rows, and return the pieces of the file; `dtype` is `checkpoint.delta_dtype`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = schema_of(dtype)
    same = ["global_step", "rank", "world_size", "feature_name", "table_fqn", "source", "column"]
    with ChecksummedFile(file) as target:
        # Embeddings and ids hardly compress.
        writer = pq.ParquetWriter(
            pa.PythonFile(_Sink(target), mode="w"), schema, compression="none", use_dictionary=same,  # pyright: ignore[reportArgumentType]  it takes columns, too
            write_statistics=False,
        )  # fmt: skip
        with writer:
            for each in changes:
                width = 1 if each.values is None else each.values.shape[1]
                size = max(1, _GROUP_BYTES // (4 * width))
                for first in range(0, len(each.keys), size):
                    part = slice(first, min(first + size, len(each.keys)))
                    count = part.stop - first
                    columns = {
                        "global_step": pa.array([step] * count, pa.int64()),
                        "rank": pa.array([rank] * count, pa.int32()),
                        "world_size": pa.array([world_size] * count, pa.int32()),
                        "feature_name": pa.array([each.feature] * count),
                        "table_fqn": pa.array([each.table] * count),
                        "key_id": pa.array(each.keys[part].numpy()),
                        "row": pa.array(each.rows[part].numpy()),
                        **_embeddings(None if each.values is None else each.values[part], count, schema),
                        "source": pa.array([each.source] * count),
                        "column": pa.array([each.column] * count, pa.int32()),
                    }
                    writer.write_table(pa.table(columns, schema=schema), row_group_size=count)
    return target.pieces


def schema_of(dtype: str) -> Any:
    """Return the pyarrow schema of a delta's rows."""
    import pyarrow as pa

    of_bytes = [pa.field("scale", pa.float32()), pa.field("bias", pa.float32())]
    return pa.schema(
        [
            pa.field("global_step", pa.int64()),
            pa.field("rank", pa.int32()),
            pa.field("world_size", pa.int32()),
            pa.field("feature_name", pa.string()),
            pa.field("table_fqn", pa.string()),
            pa.field("key_id", pa.int64()),
            pa.field("row", pa.int64()),
            pa.field("embedding", pa.list_(pa.uint8() if dtype == INT8 else pa.float32())),
            *(of_bytes if dtype == INT8 else []),
            pa.field("source", pa.string()),
            pa.field("column", pa.int32()),
        ]
    )


def _embeddings(values: torch.Tensor | None, count: int, schema: Any) -> dict[str, Any]:
    import pyarrow as pa

    names = [name for name in ("embedding", "scale", "bias") if name in schema.names]
    if values is None:
        return {name: pa.nulls(count, schema.field(name).type) for name in names}
    values, others = values.float(), dict[str, Any]()
    if "scale" in names:
        values, scale, bias = in_bytes(values)
        others = {"scale": pa.array(scale.numpy()), "bias": pa.array(bias.numpy())}
    ends = pa.array(torch.arange(0, values.numel() + 1, values.shape[1], dtype=torch.int32).numpy())
    return {"embedding": pa.ListArray.from_arrays(ends, pa.array(values.flatten().numpy())), **others}


def in_bytes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows [n, D] float32 as bytes [n, D], scales [n] and biases [n]: a row is bytes * scale + bias, rounded."""
    bias = values.amin(1)
    scale = (values.amax(1) - bias) / _LEVELS
    steps = (values - bias[:, None]) / torch.where(scale > 0, scale, 1.0)[:, None]
    return steps.round().clamp(0, _LEVELS).to(torch.uint8), scale, bias


class _Sink:
    """A `ChecksummedFile` as pyarrow writes to it; it is closed by its own context."""

    closed = False

    def __init__(self, file: ChecksummedFile) -> None:
        self.write, self.tell, self.flush = file.write, file.tell, file.flush

    def close(self) -> None:
        pass
