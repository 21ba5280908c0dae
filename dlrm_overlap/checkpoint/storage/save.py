"""Writing a checkpoint from all ranks: beside its final place, synced, with the manifest last, then renamed."""

import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from dlrm_overlap.checkpoint.storage.extents import Extent
from dlrm_overlap.checkpoint.storage.manifest import (
    MANIFEST,
    Manifest,
    Piece,
    StoredFile,
    StoredTensor,
    dump_manifest,
    write_synced,
)
from dlrm_overlap.checkpoint.storage.tensor_file import ToCpu, copy_to_cpu, dtype_code, write_tensors
from dlrm_overlap.comm.every_rank import on_every_rank
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.files import sync_folder

_SPARE_BYTES = 1 << 20  # for the manifest and the files' headers
_PARTIAL = ".partial_"  # in front of the name of a folder that is being written or removed
_T = TypeVar("_T")


def write_checkpoint(
    final: Path,
    mine: list[Extent],
    manifest: Callable[[], Manifest],
    group: dist.ProcessGroup | None = None,
    to_cpu: ToCpu = copy_to_cpu,
    refusal: Callable[[], InputError | None] = lambda: None,
) -> None:
    """Write the extents of all ranks and a manifest to `final`, all of it or nothing; a collective.

    Args:
        final: the folder to make. One that is there is replaced.
        mine: the extents that this rank stores, of `deal`.
        manifest: called on rank 0; without tensors and files.
        group: of all ranks, which nothing else uses meanwhile; None is the default group.
        to_cpu: copies elements to the CPU.
        refusal: called on every rank once its file is written; returns an error if the checkpoint is refused.

    Raises:
        InputError: on all ranks, if one of them cannot write, or refuses. No checkpoint appears, those that are there
            stay.
    """
    rank, temporary = dist.get_rank(), final.with_name(f"{_PARTIAL}{final.name}")
    needed = sum(gather(sum(extent.tensor.nbytes for extent in mine), group)) + _SPARE_BYTES
    ranks = group or dist.group.WORLD
    assert ranks is not None

    def on_all(act: Callable[[], _T]) -> _T:
        return on_every_rank(lambda: _writing(final, act), ranks)

    try:
        on_all(lambda: None if rank else _make(temporary, needed))
        tensors = {extent.key: extent.tensor for extent in mine}
        written = on_all(lambda: _write_file(temporary / _file(rank), tensors, to_cpu))
        gathered = gather((written, _describe(mine, _file(rank)), refusal()), group)
        if refusals := [each for _, _, each in gathered if each]:
            raise refusals[0]
        files = [(file, described) for file, described, _ in gathered]
        on_all(lambda: None if rank else _commit(temporary, final, manifest(), files))
    except InputError:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_checkpoint(path: Path) -> None:
    """Remove the checkpoint `path`, which is not found any more from the first moment on."""
    removed = path.with_name(f"{_PARTIAL}removed_{path.name}")
    os.replace(path, removed)
    shutil.rmtree(removed, ignore_errors=True)  # the next save tries again


def gather(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Return the `value` of every rank of `group`, by rank; a collective. Without a process group, this one's."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def _file(rank: int) -> str:
    return f"rank_{rank}.safetensors"


def _writing(final: Path, act: Callable[[], _T]) -> _T:
    """Do `act`; raise the operating system's error as an InputError."""
    try:
        return act()
    except OSError as error:
        raise InputError(
            f"checkpoint: {final} cannot be written ({error.strerror or error}); the checkpoints before it are as they "
            f"were; make room or mend the folder, and start again: the run goes on from the newest, or, without any, "
            f"begins anew"
        ) from None


def _make(temporary: Path, needed_bytes: int) -> None:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for left in temporary.parent.glob(f"{_PARTIAL}*"):  # by a run that died
        shutil.rmtree(left)
    free = shutil.disk_usage(temporary.parent).free
    if needed_bytes > free:
        raise OSError(f"it takes {needed_bytes} bytes, and {free} are left on the disk")
    temporary.mkdir()


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor], to_cpu: ToCpu) -> StoredFile:
    with path.open("xb") as file:
        written = write_tensors(file, tensors, to_cpu)
        file.flush()
        os.fsync(file.fileno())
    return written


def _describe(extents: list[Extent], file: str) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for extent in extents:
        before = tensors[extent.name].pieces if extent.name in tensors else ()
        piece = Piece(file, extent.key, extent.offsets, extent.sizes)
        tensors[extent.name] = StoredTensor(
            dtype_code(extent.tensor.dtype), extent.shape, (*before, piece), extent.per_row
        )
    return tensors


def _commit(
    temporary: Path, final: Path, manifest: Manifest, gathered: list[tuple[StoredFile, dict[str, StoredTensor]]]
) -> None:
    """Write the manifest of all ranks' files and give the folder its name."""
    tensors: dict[str, StoredTensor] = {}
    for _, described in gathered:
        for name, tensor in described.items():
            before = tensors[name].pieces if name in tensors else ()
            tensors[name] = replace(tensor, pieces=(*before, *tensor.pieces))
    for name, tensor in tensors.items():
        held = sum(math.prod(piece.sizes) for piece in tensor.pieces)
        assert held == math.prod(tensor.shape), f"the ranks have {held} elements of {name}, {tensor.shape}"
    files = {_file(rank): written for rank, (written, _) in enumerate(gathered)}
    text = dump_manifest(replace(manifest, tensors=dict(sorted(tensors.items())), files=files))
    write_synced(temporary / MANIFEST, text)
    sync_folder(temporary)
    if final.exists():  # abandoned or damaged, since it has this very step
        remove_checkpoint(final)
    os.replace(temporary, final)
    sync_folder(final.parent)
