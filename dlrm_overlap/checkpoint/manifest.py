"""The manifest of a checkpoint, `checkpoint.json`: what a run must know before it loads one. Loads no torch.

It is written last. Each has the number of its save in its folder, so that of a run which went back to an earlier
checkpoint and on from there, the one that was saved last is known.
"""

import dataclasses
import json
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm_overlap.config import InputError, in_one_line

log = logging.getLogger("dlrm_overlap")

FORMAT = 3
MANIFEST = "checkpoint.json"
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Manifest:
    """The facts of a checkpoint."""

    step: int
    """step after which it was written"""
    shape: dict[str, Any]
    """must be the same in a run that loads it"""
    settings: dict[str, Any] = field(default_factory=dict)
    """should be the same: which samples a step takes"""
    saved: int = 0
    """number of this save in its folder; the greatest one was written last"""
    metrics: dict[str, float] = field(default_factory=dict)
    """of the evaluation after this step, if there was one"""
    about: dict[str, Any] = field(default_factory=dict)
    """for readers: the resolved configuration, the plan, the number of ranks"""
    files: dict[str, int] = field(default_factory=dict)
    """bytes of each other file"""
    format: int = FORMAT


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write `manifest` to the folder `checkpoint`, and sync it."""
    with (checkpoint / MANIFEST).open("w") as file:
        json.dump(dataclasses.asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of the folder `checkpoint`.

    Raises:
        InputError: if it cannot be read, or is of the format of another version of this program.
    """
    path = checkpoint / MANIFEST
    try:
        content = json.loads(path.read_text())
        if content["format"] == FORMAT:
            return Manifest(**content)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not what was written ({in_one_line(error):.80})") from None
    raise InputError(
        f"{path} has format {content['format']}, and this program knows {FORMAT}; use the one that wrote it"
    )


def read_whole(checkpoint: Path) -> Manifest:
    """Return the manifest of `checkpoint`, once its files were found.

    Raises:
        InputError: as `read_manifest` does, or if a file is not there, or has another size.
    """
    manifest = read_manifest(checkpoint)
    for name, expected in manifest.files.items():
        try:
            size = (checkpoint / name).stat().st_size
        except OSError as error:
            raise InputError(f"{checkpoint / name} cannot be read ({error.strerror})") from None
        if size != expected:
            raise InputError(f"{checkpoint / name} has {size} bytes, not {expected}")
    return manifest


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is the folder of a checkpoint, be it damaged: its manifest may be none."""
    return os.path.exists(path / MANIFEST)  # pathlib raises where a name is too long


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders in `folder` that are named as checkpoints are, by step."""
    named = (path for path in folder.glob("step_*") if _STEP.fullmatch(path.name))
    return sorted((path for path in named if path.is_dir()), key=lambda path: int(path.name[5:]))


def same_checkpoint(folder: Path, path: Path) -> Path | None:
    """Return the checkpoint in `folder` that `path` leads to, also by another name or a link; None without any."""
    return next((each for each in checkpoint_folders(folder) if path.exists() and each.samefile(path)), None)


def newest_first(folder: Path) -> tuple[dict[Path, Manifest], list[Path]]:
    """Return the manifests of the checkpoints in `folder`, that of the last save first, and those without one."""
    manifests, unreadable = dict[Path, Manifest](), list[Path]()
    for path in checkpoint_folders(folder):
        try:
            manifests[path] = read_manifest(path)
        except InputError:
            unreadable.append(path)
    return dict(sorted(manifests.items(), key=lambda item: -item[1].saved)), unreadable[::-1]


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint in `folder` that a run goes on from if it is whole, None without any."""
    manifests, unreadable = newest_first(folder)
    return next(iter([*unreadable, *manifests]), None)


def locate_checkpoint(path: Path, key: str) -> Path:
    """Return the checkpoint that `path` names: itself, or, of a run's folder, the one that was saved last.

    Raises:
        InputError: naming the option `key`, if it is neither.
    """
    if is_checkpoint(path):
        return path
    if newest := newest_checkpoint(path / "checkpoints"):
        return newest
    raise InputError(
        f"{key}: {str(path)!r} is neither a checkpoint nor the folder of a run that has one; give a folder named "
        f"step_<N>, or that of a run"
    )


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
