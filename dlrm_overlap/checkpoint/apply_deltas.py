"""The command `delta apply`: a checkpoint's weights, brought up to date by deltas. Needs no process group or GPU.

base's weights -> each delta, in order: tombstones, rows and ids of tables, dense parameters -> a checkpoint's folder
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dlrm_overlap.checkpoint.delta_files import (
    UPDATE,
    ChangedRows,
    DeltaManifest,
    read_changes,
    read_delta,
    read_dense,
    state_of_checkpoint,
    state_of_delta,
)
from dlrm_overlap.checkpoint.extents import Extent
from dlrm_overlap.checkpoint.manifest import (
    APPLIED,
    ENCODING_FILES,
    Manifest,
    differences,
    is_checkpoint,
    read_complete,
    write_manifest,
)
from dlrm_overlap.checkpoint.pieces import CheckedFile, ChecksummedFile, DamagedError, Piece
from dlrm_overlap.checkpoint.storage import read_weights, save_extents
from dlrm_overlap.config import InputError
from dlrm_overlap.kernels.ids.id_map import EMPTY, mix
from dlrm_overlap.launching.files import sync_folder

_IDS = "_hash_zch_identities"  # TorchRec's name of the ids of a table of any id


def apply_deltas(base: Path, deltas: Sequence[Path], output: Path) -> Manifest:
    """Write the checkpoint `base` with `deltas` applied, in this order, to the new folder `output`.

    All weights must fit in memory at once. The result has weights only: it serves `predict`, `eval` and further deltas,
    and no run resumes from it. Times and counts of tables of any id, by which training evicts ids, stay as in `base`.

    Raises:
        InputError: if a delta does not follow, is damaged, or is of another model; or if the result cannot be written.
    """
    if not is_checkpoint(base):
        raise InputError(f"delta apply: {base} is not a checkpoint; give a folder named step_<N>")
    if os.path.lexists(output):
        raise InputError(f"--output: {output} exists; name a new folder")
    manifest = read_complete(base)
    # Check the whole chain before anything large is read.
    state, chain = state_of_checkpoint(manifest), list[tuple[Path, DeltaManifest]]()
    for path in deltas:
        found = read_delta(path)
        check_follows(path, found, manifest, state)
        state = state_of_delta(found)
        chain.append((path, found))
    weights = read_weights(base, manifest)
    for path, found in chain:
        apply(path, found, weights)
    about = manifest.about | {APPLIED: state}
    result = replace(manifest, step=state["step"], metrics={}, saved=0, about=about)
    try:
        return _write(base, manifest, result, weights, output)
    except OSError as error:
        raise InputError(f"--output: {output} cannot be written ({error.strerror}); name another folder") from None


def check_follows(path: Path, delta: DeltaManifest, model: Manifest, state: dict) -> None:
    """Raise an InputError unless the delta can be applied to weights of `model`'s shape that are in `state`.

    `state` has the fields of `DeltaManifest.base`.
    """
    if differing := differences(delta, model.shape):
        raise InputError(
            f"delta: {path} is of another model: it has {differing.replace('this run', 'the base')}; give the deltas "
            f"of the run that the base is from"
        )
    if delta.follows(state):
        return
    base = delta.base["step"]
    if base == state["step"]:
        raise InputError(
            f"delta: {path} follows another save of step {base} than the given one; give deltas of the run, and the "
            f"branch of it, that the base is from"
        )
    cure = f"give the deltas from step {state['step']} to {base} before it" if base > state["step"] else "leave it out"
    raise InputError(f"delta: {path} follows step {base}, but the weights are those of step {state['step']}; {cure}")


def apply(path: Path, manifest: DeltaManifest, weights: Mapping[str, torch.Tensor]) -> None:
    """Change `weights`, a checkpoint's by name, in place; they are partly changed after a DamagedError."""
    for changes in read_changes(path, manifest):
        _apply_rows(path, changes, weights)
    for name, tensor in read_dense(path, manifest).items():
        if name not in weights or weights[name].shape != tensor.shape:
            raise DamagedError(f"{path} is damaged: it has a parameter {name}, which the model has not")
        weights[name].copy_(tensor)


def _apply_rows(path: Path, changes: ChangedRows, weights: Mapping[str, torch.Tensor]) -> None:
    table, rows, keys = weights.get(changes.table), changes.rows, changes.keys
    width = 0 if changes.values is None else changes.values.shape[1]
    if table is None or table.dim() != 2 or changes.column + width > table.shape[1]:
        raise DamagedError(f"{path} is damaged: it has rows of {changes.table}, which the model has not")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(table):
        raise DamagedError(f"{path} is damaged: it has rows outside {changes.table}, of {len(table)} rows")
    ids = ids_of(changes.table, weights)
    if changes.source == UPDATE:
        assert changes.values is not None
        table[rows, changes.column : changes.column + width] = changes.values.to(table.dtype)
        if ids is not None:
            ids[rows, 0] = mix(keys)
    elif ids is not None:
        gone = ids[rows, 0] == mix(keys)  # else the row has a new id already
        ids[rows[gone], 0] = EMPTY


def ids_of(table: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the hashed ids [rows, 1] of a table of any id, by the name of its weight; None for other tables."""
    end = f".{table.split('.')[-2]}.{_IDS}"
    return next((weights[name] for name in weights if name.endswith(end)), None)


def _write(base: Path, stored: Manifest, result: Manifest, weights: dict[str, torch.Tensor], output: Path) -> Manifest:
    temporary = output.with_name(f".partial_{output.name}_step_{result.step}")
    shutil.rmtree(temporary, ignore_errors=True)
    extents = [
        Extent(("model", name), tuple(tensor.shape), (0,) * tensor.dim(), tensor) for name, tensor in weights.items()
    ]
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        files = save_extents(temporary, extents)
        if stored.encoding is not None:
            files |= _copy_encoding(base, stored, temporary)
        written = write_manifest(temporary, replace(result, files=files))
        sync_folder(temporary)
        os.replace(temporary, output)
        sync_folder(output.parent)
        return written
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _copy_encoding(base: Path, stored: Manifest, target: Path) -> dict[str, list[Piece]]:
    copies = {}
    for name in ENCODING_FILES:
        (target / name).parent.mkdir(exist_ok=True)
        with CheckedFile(base / name, 0, stored.files[name]) as file, ChecksummedFile(target / name) as copy:
            shutil.copyfileobj(file, copy)
        copies[name] = copy.pieces
    sync_folder((target / ENCODING_FILES[0]).parent)
    return copies
