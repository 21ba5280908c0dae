"""The tensors of a checkpoint, in the format of `torch.distributed.checkpoint` (DCP).

`dcp.load` reads them into `{"model": .., "optimizer": ..}`, the state dicts of any TorchRec model under any plan.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dlrm_overlap.checkpoint.dcp_files import Reader, Writer
from dlrm_overlap.checkpoint.extents import Extent, is_finite, sources
from dlrm_overlap.checkpoint.manifest import Manifest
from dlrm_overlap.checkpoint.pieces import DamagedError, Piece, UnreadableError
from dlrm_overlap.comm.every_rank import gathered
from dlrm_overlap.config import InputError, PeerError, in_one_line
from dlrm_overlap.launching.resources import exhausted_memory

_PIECE_BYTES = 1 << 26  # copied to the CPU, and read, at a time


def save_extents(
    folder: Path,
    extents: Sequence[Extent],
    group: dist.ProcessGroup | None = None,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[Piece]]:
    """Write all ranks' extents to the new folder `folder`, and return the pieces of each file.

    A collective if there is a process group.

    An extent that several ranks have is written once. Nothing else may use `group` during the call. `tick` is called
    for each piece.

    Raises:
        OSError: on all ranks, if one of them cannot write.
        PeerError: on the other ranks, if a rank fails for another reason.
    """
    writer = Writer(folder)
    try:
        with _alone():
            save({}, storage_writer=writer, planner=_SavePlanner(extents, tick), process_group=group)
    except CheckpointException as error:
        rank, cause = _first_failure(error)
        if isinstance(cause, OSError) or not dist.is_initialized() or rank == dist.get_rank():
            raise cause from None
        raise PeerError(f"rank {rank} has failed: {type(cause).__name__}: {in_one_line(cause):.300}") from None
    ranks = group or dist.group.WORLD
    if ranks is None:
        return writer.pieces
    return {name: pieces for each in gathered(writer.pieces, ranks) for name, pieces in each.items()}


def load_extents(path: Path, extents: Sequence[Extent], tick: Callable[[], None] = lambda: None) -> None:
    """Fill `extents` from the checkpoint `path`; a collective if there is a process group.

    Raises:
        DamagedError: on all ranks, if a file is damaged. Some extents are then filled.
        UnreadableError: on all ranks, if one cannot read it now, for example without memory.
        InputError: on all ranks, if a tensor is missing or has another shape.
    """
    planner = _LoadPlanner(extents, tick)
    _read(path, planner)
    planner.take_means()


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the stored tensors; a collective that raises as `load_extents` does."""
    planner = _PiecesPlanner({}, lambda *_: None, lambda: None)
    _read(path, planner)
    return {name: tuple(each.size) for name, each in planner.stored.items()}


def read_pieces(
    path: Path,
    rows: Mapping[str, torch.Tensor | None],
    take: Callable[[str, int, torch.Tensor], None],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Call `take(name, first row, piece)` for stored pieces, which are consecutive rows of a tensor; a collective.

    Args:
        path: of the checkpoint.
        rows: name of a stored tensor -> the rows wanted on this rank, [n] int64 in ascending order; None for all. Only
            pieces that have one of them are read.
        take: may keep the piece, which is on the CPU.
        tick: called for each piece.

    Raises:
        DamagedError: on all ranks, if a file is damaged.
        InputError: on all ranks, if a tensor is missing.
    """
    _read(path, _PiecesPlanner(rows, take, tick))


def find_faults(path: Path) -> list[str]:
    """Return what is wrong with the tensors of a checkpoint; an UnreadableError if they cannot be read now."""
    planner = _VerifyPlanner([], lambda: None)
    try:
        _read(path, planner)
    except UnreadableError:
        raise
    except InputError as error:
        return [str(error)]
    return [f"{path}: {name} is nan or infinite" for name in dict.fromkeys(planner.not_finite)]


def read_unsharded(path: Path) -> dict[str, Any]:
    """Return {"model": weights by name, "optimizer": states}, all in memory; an InputError if unreadable."""
    planner = _EmptyStateDictLoadPlanner()
    _read(path, planner)
    return planner.original_state_dict


def read_weights(path: Path, manifest: Manifest | None = None) -> dict[str, torch.Tensor]:
    """Return the unsharded model's weights by name, without optimizer states; an InputError if unreadable.

    The files in the folder `path` must be those of `manifest`, if it is given.
    """
    planner = _EmptyStateDictLoadPlanner(keys={"model"})
    _read(path, planner, manifest)
    return planner.original_state_dict["model"]


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    stored = metadata.state_dict_metadata
    return {name: each for name, each in stored.items() if isinstance(each, TensorStorageMetadata)}


@contextmanager
def _alone() -> Iterator[None]:
    """In the context, DCP does not warn that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _read(path: Path, planner: DefaultLoadPlanner, manifest: Manifest | None = None) -> None:
    try:
        with _alone():
            load({}, storage_reader=Reader(path, manifest), planner=planner)
    except CheckpointException as error:
        rank, cause = _first_failure(error)
        if not isinstance(cause, Exception):  # DCP also collects KeyboardInterrupt and SystemExit
            raise cause from None
        if isinstance(cause, (DamagedError, UnreadableError)):
            raise type(cause)(str(cause)) from None
        if isinstance(cause, InputError):
            raise InputError(f"{path}: {cause}") from None
        if exhausted_memory(cause):
            raise UnreadableError(
                f"{path}: rank {rank} has no memory left to load it; free some on its machine, and try again"
            ) from None
        text = f"{type(cause).__name__}: {in_one_line(cause):.200}"
        raise UnreadableError(f"{path} cannot be read by rank {rank} ({text})") from None


def _first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    rank = min(error.failures)
    return rank, error.failures[rank][0]


class _SavePlanner(DefaultSavePlanner):
    """Plans the writes of this rank's extents. DCP ensures that an extent which several ranks have is written once."""

    def __init__(self, extents: Sequence[Extent], tick: Callable[[], None]) -> None:
        super().__init__()
        self._extents, self._tick = extents, tick
        self._pieces: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items, paths = [], {}
        for extent in self._extents:
            name, size = extent.stored_name, torch.Size(extent.shape)
            paths[name] = *extent.path[:-1], extent.path[-1] + name.removeprefix(extent.name)
            for offsets, piece in _pieces(extent):
                index = MetadataIndex(name, offsets)
                self._pieces[index] = piece
                chunk = ChunkStorageMetadata(torch.Size(offsets), piece.size())
                data = TensorWriteData(chunk, TensorProperties(dtype=piece.dtype), size)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=paths)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        self._tick()
        return self._pieces[index]


def _pieces(extent: Extent) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    tensor = extent.tensor.detach()
    if not tensor.numel() and 0 not in extent.shape:  # this rank has no rows of the table
        return []
    if not tensor.dim() or not tensor.numel():
        return [(extent.offsets, tensor)]
    rows = max(1, _PIECE_BYTES // (tensor.nbytes // len(tensor)))
    first, *others = extent.offsets
    return [((first + i * rows, *others), piece) for i, piece in enumerate(tensor.split(rows))]


class _LoadPlanner(DefaultLoadPlanner):
    stored: dict[str, TensorStorageMetadata]

    def __init__(self, extents: Sequence[Extent], tick: Callable[[], None]) -> None:
        super().__init__()
        self._extents, self._tick = extents, tick
        self._means: list[tuple[Extent, list[tuple[int, torch.Tensor]]]] = []
        self._targets: dict[str, list[torch.Tensor]] = {}
        """name of a stored tensor -> the tensors to fill from it"""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self.stored = _tensors(metadata)

    def create_local_plan(self) -> LoadPlan:
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for extent in self._extents:
            found = sources(extent, self.stored)
            if not found:
                raise InputError(f"the checkpoint has no {extent.name}, which this run's model and optimizers have")
            targets = [extent.tensor.detach()]
            if len(found) > 1:
                targets = [torch.empty(extent.tensor.shape, dtype=torch.float64) for _ in found]
                self._means.append((extent, list(zip(found.values(), targets, strict=True))))
            for name, target in zip(found, targets, strict=True):
                if (shape := tuple(self.stored[name].size)) != extent.shape:
                    raise InputError(
                        f"the checkpoint has {extent.name} of shape {list(shape)}, this run {list(extent.shape)}"
                    )
                chunk = ChunkStorageMetadata(torch.Size(extent.offsets), target.size())
                chunks.setdefault(name, []).append(chunk)
                self._targets.setdefault(name, []).append(target)
        return _reading({name: (self.stored[name], chunks[name]) for name in chunks})

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.index is not None
        return self._targets[index.fqn][index.index]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._tick()

    def take_means(self) -> None:
        for extent, parts in self._means:
            total = torch.stack([columns * part for columns, part in parts]).sum(0)
            extent.tensor.detach().copy_(total / sum(columns for columns, _ in parts))


class _PiecesPlanner(_LoadPlanner):
    def __init__(
        self,
        rows: Mapping[str, torch.Tensor | None],
        take: Callable[[str, int, torch.Tensor], None],
        tick: Callable[[], None],
    ) -> None:
        super().__init__([], tick)
        self._rows, self._take = rows, take

    def create_local_plan(self) -> LoadPlan:
        if missing := next((name for name in self._rows if name not in self.stored), None):
            raise InputError(f"the checkpoint has no {missing}, which this run's model and optimizers have")
        return _reading(
            {
                name: (self.stored[name], [chunk for chunk in self.stored[name].chunks if _has_one(chunk, rows)])
                for name, rows in self._rows.items()
            }
        )

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths, dtype=self.stored[read_item.dest_index.fqn].properties.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._tick()
        index = read_item.dest_index
        assert index.offset is not None
        self._take(index.fqn, index.offset[0] + read_item.dest_offsets[0], tensor)


def _has_one(chunk: ChunkStorageMetadata, rows: torch.Tensor | None) -> bool:
    if rows is None:
        return True
    first, end = torch.searchsorted(rows, torch.tensor([chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]])).tolist()
    return first < end


class _VerifyPlanner(_LoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        self.not_finite: list[str] = []
        return _reading({name: (each, each.chunks) for name, each in self.stored.items()})

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths, dtype=self.stored[read_item.dest_index.fqn].properties.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if not is_finite(tensor):
            self.not_finite.append(read_item.dest_index.fqn)


def _reading(wanted: Mapping[str, tuple[TensorStorageMetadata, list[ChunkStorageMetadata]]]) -> LoadPlan:
    return LoadPlan(
        [
            item
            for name, (stored, chunks) in wanted.items()
            for item in create_read_items_for_chunk_list(name, stored, chunks)
        ]
    )
