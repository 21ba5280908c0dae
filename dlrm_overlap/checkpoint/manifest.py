"""The manifest of a checkpoint, `checkpoint.json`: what a run must know before it loads one. Loads no torch.

It is written last, and ends with a checksum of its own text. Each has the number of its save in its folder, so that of
a run which went back to an earlier checkpoint and on from there, the one that was saved last is known.
"""

import dataclasses
import json
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from dlrm_overlap.checkpoint.pieces import DamagedError, Piece
from dlrm_overlap.config import InputError, in_one_line
from dlrm_overlap.launching.files import open_file

log = logging.getLogger("dlrm_overlap")

FORMAT = 4
_WITHOUT_CHECKSUMS = 3  # the format before, which has the files' sizes alone
MANIFEST = "checkpoint.json"
_STEP = re.compile(r"step_(\d+)")
_CHECKSUM = b',\n "checksum": "'
_CHECKSUMS = {FORMAT: re.compile(r"[0-9a-f]{32}"), _WITHOUT_CHECKSUMS: re.compile("")}
_FILE = re.compile(r"\.metadata|__[0-9]+_[0-9]+\.distcp")


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
    files: dict[str, list[Piece]] = field(default_factory=dict)
    """the pieces of each other file, in order; of a format without checksums, all of it"""
    format: int = FORMAT

    @property
    def has_checksums(self) -> bool:
        """Whether a changed bit is noticed. The format before this one has no checksums."""
        return self.format == FORMAT

    def size_of(self, file: str) -> int:
        """Return the number of bytes of `file`."""
        return sum(piece.size for piece in self.files[file])


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write `manifest` to the folder `checkpoint`, and sync it."""
    with (checkpoint / MANIFEST).open("wb") as file:
        file.write(_sealed(json.dumps(dataclasses.asdict(manifest), indent=1).rstrip("}\n").encode()))
        file.flush()
        os.fsync(file.fileno())


def _sealed(head: bytes) -> bytes:
    """Return the text of a manifest: `head`, which has all other fields, and its checksum."""
    return head + _CHECKSUM + xxh3_128(head).hexdigest().encode() + b'"\n}\n'


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of the folder `checkpoint`.

    Raises:
        DamagedError: if it cannot be read or is not the one that was written.
        InputError: if it is of the format of another version of this program.
    """
    path = checkpoint / MANIFEST
    try:
        with open_file(path) as file:
            data = file.read()
        content = json.loads(data)
        if (version := content["format"]) not in (FORMAT, _WITHOUT_CHECKSUMS):
            raise InputError(
                f"{path} has format {version!s:.80}, and this program knows {FORMAT}; use the one that wrote it"
            )
        if version == FORMAT:
            if data != _sealed(data.rpartition(_CHECKSUM)[0]):
                raise ValueError("its checksum differs")
            del content["checksum"]
        else:
            content["files"] = {name: [[size, ""]] for name, size in content["files"].items()}
        files = {name: [Piece(*piece) for piece in pieces] for name, pieces in content["files"].items()}
        manifest = Manifest(**content | {"files": files})
        _check_types(manifest)
    except InputError:
        raise
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is not what was written ({in_one_line(error):.80})") from None
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Check the types that readers rely on, since anyone can make a manifest with the right checksum.

    Raises:
        ValueError: naming a field of another type.
    """
    about, pieces = manifest.about, [piece for each in manifest.files.values() for piece in each]
    groups, plan, versions, sums = (about.get(key, {}) for key in ("config", "plan", "versions", "trained_metrics"))
    checks = {
        "step": _is_count(manifest.step, below=1 << 31),
        "saved": _is_count(manifest.saved),
        "shape": isinstance(manifest.shape, dict),
        "settings": isinstance(manifest.settings, dict),
        "metrics": all(map(_is_number, manifest.metrics.values())),
        "config": all(isinstance(group, dict) for group in groups.values()),
        "plan": all(isinstance(table["sharding"], str) for table in plan.values()),
        "world_size": _is_count(about.get("world_size", 0)),
        "versions": all(isinstance(version, str) for version in versions.values()),
        "trained_metrics": all(_is_count(place) and _is_number(value) for place, value in sums),
        "files": all(_FILE.fullmatch(name) for name in manifest.files),
        "pieces": all(
            _is_count(piece.size) and _CHECKSUMS[manifest.format].fullmatch(piece.checksum) for piece in pieces
        ),
    }
    if wrong := [name for name, is_right in checks.items() if not is_right]:
        raise ValueError(f"{wrong[0]} has a value of another type")


def _is_count(value: Any, below: int = 1 << 63) -> bool:
    return type(value) is int and 0 <= value < below


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def read_whole(checkpoint: Path) -> Manifest:
    """Return the manifest of `checkpoint`, once all its files are found and have their sizes.

    Raises:
        DamagedError: if a file is not there, is not a regular file, or has another size.
        InputError: as `read_manifest` does.
    """
    manifest = read_manifest(checkpoint)
    for name in manifest.files:
        path, expected = checkpoint / name, manifest.size_of(name)
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DamagedError(f"{path} cannot be read ({error.strerror})") from None
        if size != expected:
            raise DamagedError(f"{path} has {size} bytes, not {expected}")
    return manifest


def without_checksums(checkpoint: Path) -> str:
    """Return what to tell a user of a checkpoint that has no checksums."""
    return f"{checkpoint} is of an earlier version and has no checksums, so changed bits in its tensors go unnoticed"


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
            f"--checkpoint.allow_config_mismatch true, or start anew with another --log.name"
        )
    if changes:
        log.info("resume: %s was trained with %s", path, changes)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
