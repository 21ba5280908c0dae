"""The command `checkpoint`: show, verify and export. It needs no process group and no GPU."""

from pathlib import Path
from typing import Any

import torch

from dlrm_overlap.checkpoint.storage.branches import is_checkpoint
from dlrm_overlap.checkpoint.storage.extents import Checkpoint, whole
from dlrm_overlap.checkpoint.storage.load import find_faults
from dlrm_overlap.checkpoint.storage.manifest import MANIFEST, DamagedError, Manifest, read_manifest
from dlrm_overlap.checkpoint.storage.tensor_file import write_tensors
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.files import replacing
from dlrm_overlap.launching.text_table import plain

_MODEL = "model."


def show(path: Path) -> str:
    """Return the contents of the checkpoint `path`, in lines.

    Raises:
        InputError: if it is no checkpoint, or its manifest is damaged.
    """
    manifest = _manifest(path)
    tensors = Checkpoint(path, manifest).tensors
    lines = [f"{key}: {value}" for key, value in _facts(manifest).items()]
    lines += [f"file {name}: {file.bytes} bytes, sha256 {file.sha256}" for name, file in sorted(manifest.files.items())]
    for name, tensor in sorted(tensors.items()):
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        pieces = f", {len(tensor.pieces)} pieces" if len(tensor.pieces) > 1 else ""
        lines.append(f"tensor {name}: {tensor.dtype} {shape}{', a number a row' * tensor.per_row}{pieces}")
    return "\n".join(map(plain, lines))


def _facts(manifest: Manifest) -> dict[str, Any]:
    about = manifest.about
    kinds = [table["sharding"] for table in about.get("plan", {}).values()]
    facts = {
        "step": manifest.step,
        "format": manifest.format,
        "parent": manifest.parent or "none",
        "ranks": about.get("world_size", "unknown"),
        "backend": about.get("config", {}).get("embedding", {}).get("backend", "unknown"),
        "plan": ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "unknown",
    }
    return facts | manifest.metrics | manifest.shape | manifest.settings


def verify(path: Path) -> list[str]:
    """Return the faults of the checkpoint `path`, none if it is whole.

    Raises:
        InputError: if it is no checkpoint.
    """
    try:
        return find_faults(path, _manifest(path))
    except DamagedError as error:
        return [str(error)]


def export(path: Path, output: Path, optimizer: bool = False) -> int:
    """Write the unsharded tensors of the checkpoint `path` to one file, by the names of the unsharded model.

    All of them are in memory at once.

    Args:
        path: of the checkpoint, whose files are checked first.
        output: a new file, .safetensors, or .pt, a dictionary that `torch.load(weights_only=True)` reads.
        optimizer: with the optimizers' states, under names that begin with `optimizer.state.`.

    Returns:
        The number of tensors.

    Raises:
        InputError: if the checkpoint is not whole, or the file cannot be written or is there.
    """
    if output.suffix not in (".safetensors", ".pt"):
        raise InputError(f"export: {output} must end in .safetensors or .pt, which says how tensors are written")
    if output.exists():
        raise InputError(f"export: {output} is there already; name a new file")
    if faults := verify(path):
        raise InputError(f"export: {faults[0]}; export another checkpoint")
    stored = Checkpoint(path, _manifest(path))
    tensors = {
        name.removeprefix(_MODEL): whole(name, stored)
        for name in sorted(stored.tensors)
        if optimizer or name.startswith(_MODEL)
    }
    try:
        with replacing(output) as stream:
            if output.suffix == ".pt":
                torch.save(tensors, stream)
            else:
                write_tensors(stream, tensors)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch.save's
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"export: {output} cannot be written ({reason}); name another file") from None
    return len(tensors)


def _manifest(path: Path) -> Manifest:
    if not is_checkpoint(path):
        raise InputError(f"checkpoint: {path} is not a checkpoint, it has no {MANIFEST}; give a folder named step_<N>")
    return read_manifest(path)
