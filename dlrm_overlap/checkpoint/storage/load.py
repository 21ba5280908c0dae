"""Reading a checkpoint: whether it is whole, and its tensors."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.checkpoint.storage.extents import Checkpoint, Cut, fill, local_extents
from dlrm_overlap.checkpoint.storage.manifest import (
    MANIFEST,
    DamagedError,
    Manifest,
    Piece,
    StoredTensor,
    check_file,
    read_manifest,
)
from dlrm_overlap.checkpoint.storage.save import gather
from dlrm_overlap.checkpoint.storage.tensor_file import dtype_code
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.files import read_file


def load_weights(path: Path, model: nn.Module, cuts: Mapping[str, Cut] | None = None) -> None:
    """Load the weights of the checkpoint `path`, and no optimizer's state, into `model`, sharded or not.

    `cuts` are those of `local_extents`.

    Raises:
        InputError: if it lacks a tensor of this model.
    """
    state, stored = model.state_dict(), Checkpoint(path, read_manifest(path))
    for extent in local_extents(state, {"state": {}}, cuts):
        try:
            fill(extent, stored)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    model.load_state_dict(state)


def find_faults(
    path: Path, manifest: Manifest, rank: int = 0, world_size: int = 1, tick: Callable[[], None] = lambda: None
) -> list[str]:
    """Return the faults of the checkpoint's files; `rank` looks at every file `rank` modulo `world_size`.

    Each piece must be there in the type and sizes that the manifest gives, and finite, as all are that a run saves.
    """
    faults, whole = [], set()
    for file in sorted(manifest.files)[rank::world_size]:
        try:
            check_file(path / file, manifest.files[file], tick)
            whole.add(file)
        except DamagedError as error:
            faults.append(str(error))
    try:
        stored = Checkpoint(path, manifest)
        pieces = [(name, tensor, piece) for name, tensor in stored.tensors.items() for piece in tensor.pieces]
        for name, tensor, piece in pieces:
            tick()
            if piece.file in whole:
                _check_values(path / piece.file, name, tensor, piece, stored.read(piece))
    except DamagedError as error:
        faults.append(str(error))
    return faults


def _check_values(file: Path, name: str, tensor: StoredTensor, piece: Piece, values: torch.Tensor) -> None:
    """Check that the values of a piece are of the tensor's type, as many as the manifest says, and finite.

    Raises:
        DamagedError: if they are not.
    """
    if tensor.dtype != dtype_code(values.dtype):
        raise DamagedError(f"{file} holds {name} as {dtype_code(values.dtype)}, not {tensor.dtype}")
    if tuple(values.shape) != (piece.sizes[:1] if tensor.per_row else piece.sizes):
        raise DamagedError(f"{file} holds {name} in another shape than the manifest says")
    if values.is_floating_point() and values.numel():
        least, greatest = values.aminmax()  # NaN, if there is one
        if not (least.isfinite() and greatest.isfinite()):
            raise DamagedError(f"{file} holds values of {name} that are nan or infinite")


def agree_on(path: Path, tick: Callable[[], None] = lambda: None) -> tuple[Manifest | None, list[str]]:
    """Return the manifest of the checkpoint `path`, None if that is damaged, and all faults; a collective.

    Every rank reads its share of the files, and calls `tick` for each piece.

    Raises:
        InputError: if ranks see different checkpoints there, naming one that sees another than rank 0.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    seen, faults, manifest = "nothing", [], None
    try:
        manifest = read_manifest(path)
        seen = hashlib.sha256(read_file(path / MANIFEST)).hexdigest()
    except (DamagedError, OSError) as error:
        faults = [str(error)]
    everywhere = gather(seen)
    for other, text in enumerate(everywhere):
        if text != everywhere[0]:
            raise InputError(
                f"checkpoint: rank {other} does not see the same in {path} as rank 0; put it on a file system that all "
                f"hosts see"
            )
    if manifest is None:
        return None, faults
    return manifest, [fault for each in gather(find_faults(path, manifest, rank, world_size, tick)) for fault in each]
