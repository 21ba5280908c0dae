"""Reading a checkpoint: whether it is whole, and its tensors."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from dlrm_overlap.checkpoint.storage.extents import Checkpoint, Cut, fill, local_extents
from dlrm_overlap.checkpoint.storage.manifest import (
    MANIFEST,
    DamagedError,
    Manifest,
    check_file,
    read_manifest,
)
from dlrm_overlap.checkpoint.storage.save import gather
from dlrm_overlap.config import InputError


def load_weights(path: Path, model: nn.Module, cuts: Mapping[str, Cut] | None = None) -> None:
    """Load the weights of the checkpoint `path`, and no optimizer's state, into `model`, sharded or not.

    `cuts` are those of `local_extents`.

    Raises:
        InputError: if it lacks a tensor of this model.
    """
    state = model.state_dict()
    fill_state(path, read_manifest(path), state, {"state": {}}, cuts)
    model.load_state_dict(state)


def fill_state(
    path: Path,
    manifest: Manifest,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    cuts: Mapping[str, Cut] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Copy the stored elements into the state dicts of a model and its optimizers, see `local_extents`.

    Raises:
        InputError: if the checkpoint lacks a tensor of them.
    """
    stored = Checkpoint(path, manifest)
    for extent in local_extents(model, optimizer, cuts):
        tick()
        try:
            fill(extent, stored)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def find_faults(
    path: Path, manifest: Manifest, rank: int = 0, world_size: int = 1, tick: Callable[[], None] = lambda: None
) -> list[str]:
    """Return the faults of the checkpoint's files; `rank` looks at every file `rank` modulo `world_size`.

    A file has none if it has the size and the checksum that the manifest gives.
    """
    faults = []
    for file in sorted(manifest.files)[rank::world_size]:
        try:
            check_file(path / file, manifest.files[file], tick)
        except DamagedError as error:
            faults.append(str(error))
    return faults


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
        seen = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
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
