"""Which checkpoints of a folder a run goes on from, whether they fit it, and which it keeps. Loads no torch.

A run that goes on from an earlier checkpoint than the last one abandons the later ones. Each manifest has the number of
its save, and its line: the steps of the checkpoints that led to it.

Example, saves in this order: 10, 20, 30; then, gone on from 20, step 25 with the line 10, 20, 25. Step 30 is abandoned.
"""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_overlap.checkpoint.storage.manifest import MANIFEST, DamagedError, Manifest, read_manifest
from dlrm_overlap.config import InputError

log = logging.getLogger("dlrm_overlap")

_STEP = re.compile(r"step_\d+")


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders in `folder` that are named as checkpoints are, by step."""
    named = (path for path in folder.glob("step_*") if _STEP.fullmatch(path.name))
    return sorted((path for path in named if path.is_dir()), key=_step_of)


def same_checkpoint(folder: Path, path: Path) -> Path | None:
    """Return the checkpoint in `folder` that `path` leads to, also by another name or a link; None without any."""
    return next((each for each in checkpoint_folders(folder) if path.exists() and each.samefile(path)), None)


def _step_of(path: Path) -> int:
    return int(path.name.partition("_")[2])


def read_manifests(folder: Path) -> tuple[dict[Path, Manifest], dict[Path, str]]:
    """Return the manifests of the checkpoints in `folder`, and, of those whose manifest is damaged, the fault."""
    manifests: dict[Path, Manifest] = {}
    faults: dict[Path, str] = {}
    for path in checkpoint_folders(folder):
        try:
            manifests[path] = read_manifest(path)
        except DamagedError as error:
            faults[path] = str(error)
    return manifests, faults


def line(manifests: Mapping[Path, Manifest]) -> list[Path]:
    """Return the checkpoint that was written last, and those that led to it, newest first."""
    if not manifests:
        return []
    tip = max(manifests.values(), key=_order)
    led = [path for path, each in manifests.items() if each is tip or each.step in tip.line]
    return sorted(led, key=lambda path: _order(manifests[path]), reverse=True)


def surplus(manifests: Mapping[Path, Manifest], damaged: list[Path], keep: int) -> list[Path]:
    """Return the checkpoints to remove after a save.

    Of the line the newest `keep` stay. Abandoned and damaged ones stay until the line has `keep` checkpoints that were
    written after those abandoned.
    """
    order = line(manifests)
    removed = order[keep:]
    abandoned = [path for path in manifests if path not in order]
    last = max((manifests[path].saved for path in abandoned), default=-1)
    if sum(manifests[path].saved > last for path in order) >= keep:
        removed += [*abandoned, *damaged]
    return removed


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint in `folder` that a run goes on from if it is whole, None without any."""
    manifests, faults = read_manifests(folder)
    return next(iter([*line(manifests), *reversed(faults)]), None)


def locate_checkpoint(path: Path, key: str) -> Path:
    """Return the checkpoint that `path` names: itself, or, of a run's folder, the one that was written last.

    Raises:
        InputError: naming the option `key`, if it is neither, or the manifest of the last one is damaged.
    """
    if is_checkpoint(path):
        return path
    manifests, faults = read_manifests(path / "checkpoints")
    newest = next(iter(line(manifests)), None)
    for damaged, fault in reversed(faults.items()):
        if newest is None or _step_of(damaged) > manifests[newest].step:
            raise InputError(f"{key}: {fault}; name another checkpoint")
    if newest is not None:
        return newest
    raise InputError(
        f"{key}: {str(path)!r} is neither a checkpoint nor the folder of a run that has one; give a folder named "
        f"step_<N>, or that of a run"
    )


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is the folder of a checkpoint, be it damaged: its manifest may be none."""
    return os.path.exists(path / MANIFEST)  # pathlib raises where a name is too long


def _order(manifest: Manifest) -> tuple[int, int]:
    return manifest.saved, manifest.step


def differences(manifest: Manifest, shape: dict[str, Any]) -> str:
    """Return each field of `shape` that differs in a checkpoint, in words; empty if none does."""
    had = manifest.shape
    return "; ".join(
        f"{key} {_short(had.get(key))}, this run has {_short(has)}" for key, has in shape.items() if had.get(key) != has
    )


def check_fits(
    path: Path, manifest: Manifest, shape: dict[str, Any], settings: dict[str, Any], changed: bool = False
) -> None:
    """Check that a run of `shape` (`checkpoint_shape`) and `settings` (`trained_with`) can go on from `path`.

    Raises:
        InputError: with every difference, if the checkpoint is of another model, or, unless `changed` is set, was
            trained with other settings.
    """
    if parted := differences(manifest, shape):
        raise InputError(
            f"checkpoint.resume: {path} has {parted}; use the same, or start anew with --checkpoint.resume never "
            f"and another --log.name"
        )
    before = manifest.settings
    changes = ", ".join(
        f"{key} {_short(before[key])}, now {_short(value)}"
        for key, value in settings.items()
        if key in before and before[key] != value
    )
    if changes and not changed:
        raise InputError(
            f"checkpoint.resume: {path} was trained with {changes}; set what it had, take the change by "
            f"--checkpoint.resume_changed true, or start anew with another --log.name"
        )
    if changes:
        log.info("resume: %s was trained with %s", path, changes)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
