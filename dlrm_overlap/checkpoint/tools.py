"""The command `checkpoint`: show, verify and export. It needs no process group and no GPU."""

import re
from pathlib import Path
from typing import Any

from dlrm_overlap.checkpoint.manifest import ENCODING_FILES, MANIFEST, is_checkpoint, read_complete, read_manifest
from dlrm_overlap.checkpoint.pieces import CheckedFile, DamagedError, UnreadableError
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.files import replacing
from dlrm_overlap.launching.text_table import plain


def show(path: Path) -> str:
    _check_named(path)
    manifest = read_manifest(path)
    about = manifest.about
    kinds = [table["sharding"] for table in about.get("plan", {}).values()]
    facts = {
        "step": manifest.step,
        "format": manifest.format,
        "ranks": about.get("world_size", "unknown"),
        "backend": about.get("backend") or about.get("config", {}).get("embedding", {}).get("backend", "unknown"),
        "plan": ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "unknown",
        **about.get("versions", {}),
        **manifest.metrics,
        **manifest.shape,
        **manifest.settings,
        "encoding": manifest.encoding or "none",
        **{f"file {name}": f"{manifest.size_of(name)} bytes" for name in manifest.files},
    }
    return "\n".join(plain(f"{key}: {value}") for key, value in facts.items())


def verify(path: Path) -> list[str]:
    _check_named(path)
    try:
        read_complete(path)
    except UnreadableError:
        raise
    except InputError as error:
        return [str(error)]
    from dlrm_overlap.checkpoint.storage import find_faults  # loads torch

    return [*_damaged_encoding(path), *find_faults(path)]


def _damaged_encoding(path: Path) -> list[str]:
    manifest = read_manifest(path)
    try:
        for name in ENCODING_FILES if manifest.encoding else ():
            with CheckedFile(path / name, 0, manifest.files[name]):
                pass  # all pieces are checked on exit
    except DamagedError as error:
        return [str(error)]
    return []


def export(path: Path, output: Path) -> None:
    """Write a checkpoint as one file for `torch.load`: {"model": weights by name, "optimizer": states}.

    The order of names does not depend on the number of ranks or the plan. All tensors must fit in memory at once.
    """
    if output.exists():
        raise InputError(f"export: {output} exists; name a new file")
    if faults := verify(path):
        raise InputError(f"export: {faults[0]}; export another checkpoint")
    from dlrm_overlap.checkpoint.dcp_files import save_tensors  # loads torch
    from dlrm_overlap.checkpoint.storage import read_unsharded

    content = _by_name(read_unsharded(path))
    try:
        with replacing(output) as stream:
            save_tensors(content, stream)
    except OSError as error:
        raise InputError(f"export: {output} cannot be written ({error.strerror}); name another file") from None


def _check_named(path: Path) -> None:
    if not is_checkpoint(path):
        raise InputError(f"checkpoint: {path} is not a checkpoint, it has no {MANIFEST}; give a folder named step_<N>")


def _by_name(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    parts = {key: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", key)] for key in state}
    return {key: _by_name(state[key]) for key in sorted(state, key=parts.__getitem__)}
