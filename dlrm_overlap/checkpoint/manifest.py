"""The manifest of a checkpoint, `checkpoint.json`, which is written last. Does not import torch."""

import dataclasses
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from xxhash import xxh3_128

from dlrm_overlap.checkpoint.pieces import DamagedError, Piece, cannot_read
from dlrm_overlap.config import InputError, in_one_line
from dlrm_overlap.data.encoding import FILES, FOLDER, Encoded, other_encoding
from dlrm_overlap.launching.files import open_file

log = logging.getLogger("dlrm_overlap")

FORMAT = 5
_WITHOUT_ENCODING = 4
_WITHOUT_CHECKSUMS = 3  # only has file sizes
_FORMATS = FORMAT, _WITHOUT_ENCODING, _WITHOUT_CHECKSUMS
MANIFEST = "checkpoint.json"
APPLIED = "applied"
"""in `Manifest.about` of a checkpoint that `delta apply` wrote: the last delta, as in `DeltaManifest.base`"""
HELD_OUT = "held-out samples"
"""in `Manifest.settings` of checkpoints trained on files, which earlier versions lack"""
_STEP = re.compile(r"step_(\d+)")
_CHECKSUM = b',\n "checksum": "'
_PIECE_CHECKSUM, _DIGEST = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{16}")
ENCODING_FILES = [f"{FOLDER}/{name}" for name in FILES]
_FILES = [r"\.metadata|__[0-9]+_[0-9]+\.distcp|tables_rank[0-9]+\.parquet", *map(re.escape, ENCODING_FILES)]
_FILE = re.compile("|".join(_FILES))


@dataclass(frozen=True)
class Manifest:
    step: int
    shape: dict[str, Any]
    """`checkpoint_shape`: must be equal in a run that loads the checkpoint"""
    settings: dict[str, Any] = field(default_factory=dict)
    """`trained_with`: should be equal, since it decides which samples a step takes"""
    encoding: str | None = None
    """digest of the encoding of the training samples, which the checkpoint then contains"""
    saved: int = 0
    """number of this save in its folder; the last save has the greatest, even if a run went back"""
    metrics: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    """information: the resolved configuration, the plan, the number of ranks"""
    files: dict[str, list[Piece]] = field(default_factory=dict)
    """the pieces of each file except the manifest; in a format without checksums, one piece per file"""
    format: int = FORMAT
    digest: str = field(default="", compare=False)
    """xxh3_128 of the manifest's file in hexadecimal, by which deltas name what they follow; not stored"""

    @property
    def has_checksums(self) -> bool:
        return self.format != _WITHOUT_CHECKSUMS

    def size_of(self, file: str) -> int:
        return sum(piece.size for piece in self.files[file])


Kind = TypeVar("Kind", bound=Manifest)


def write_manifest(checkpoint: Path, manifest: Kind, name: str = MANIFEST) -> Kind:
    """Write the manifest, and return it with its digest."""
    content = dataclasses.asdict(manifest)
    del content["digest"]
    data = _sealed(json.dumps(content, indent=1).removesuffix("\n}").encode())
    with (checkpoint / name).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return dataclasses.replace(manifest, digest=_digest_of(data))


def _sealed(head: bytes) -> bytes:
    return head + _CHECKSUM + xxh3_128(head).hexdigest().encode() + b'"\n}\n'


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of the folder `checkpoint`.

    Raises:
        DamagedError: if it is missing or has been changed.
        UnreadableError: if it cannot be read now.
        InputError: if its format is unknown.
    """
    return read_manifest_file(checkpoint / MANIFEST, Manifest)


def read_manifest_file(path: Path, kind: type[Kind]) -> Kind:
    """Return the manifest in the file `path`; raises as `read_manifest` does."""
    try:
        with open_file(path) as file:
            data = file.read()
        content = json.loads(data)
        is_sealed = data == _sealed(data.rpartition(_CHECKSUM)[0])
        if _CHECKSUM in data and not is_sealed:
            raise ValueError("its checksum differs")
        if (version := content["format"]) not in _FORMATS:
            raise InputError(
                f"{path} has format {version!s:.80}, but this version reads {FORMAT}; use the version that wrote it"
            )
        if version != _WITHOUT_CHECKSUMS:
            if not is_sealed:
                raise ValueError("its checksum is missing")
            del content["checksum"]
        else:
            content["files"] = {name: [[size, ""]] for name, size in content["files"].items()}
        files = {name: [Piece(*piece) for piece in pieces] for name, pieces in content["files"].items()}
        manifest = kind(**content | {"files": files, "digest": _digest_of(data)})
        _check_types(manifest)
    except InputError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged ({in_one_line(error):.80})") from None
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raise a ValueError for a field of the wrong type: a correct checksum does not prove who wrote the manifest."""
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
        "id_table_rows": all(_is_count(rows) and rows > 0 for rows in about.get("id_table_rows", {}).values()),
        "versions": all(isinstance(version, str) for version in versions.values()),
        "applied": APPLIED not in about or is_state(about[APPLIED]),
        "trained_metrics": all(_is_count(index) and _is_number(value) for index, value in sums),
        "files": all(_FILE.fullmatch(name) for name in manifest.files),
        "pieces": all(
            _is_count(piece.size)
            and (_PIECE_CHECKSUM.fullmatch(piece.checksum) if manifest.has_checksums else not piece.checksum)
            for piece in pieces
        ),
        "encoding": manifest.encoding is None
        or (_DIGEST.fullmatch(manifest.encoding) and manifest.files.keys() >= set(ENCODING_FILES)),
    }
    if wrong := [name for name, is_right in checks.items() if not is_right]:
        raise ValueError(f"{wrong[0]} has the wrong type")


def is_state(value: Any) -> bool:
    """Return whether `value` has the types of `DeltaManifest.base`."""
    digests = [value["digest"], *value["same"]]
    return _is_count(value["step"], below=1 << 31) and all(_PIECE_CHECKSUM.fullmatch(digest) for digest in digests)


def _digest_of(data: bytes) -> str:
    return xxh3_128(data).hexdigest()


def _is_count(value: Any, below: int = 1 << 63) -> bool:
    return type(value) is int and 0 <= value < below


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def read_complete(checkpoint: Path) -> Manifest:
    """Return the manifest after checking the files' sizes; raises as `read_manifest` does."""
    manifest = read_manifest(checkpoint)
    check_sizes(checkpoint, manifest)
    return manifest


def check_sizes(checkpoint: Path, manifest: Manifest) -> None:
    """Raise a DamagedError if a file of the folder `checkpoint` is missing or has another size than in `manifest`."""
    for name in manifest.files:
        path, expected = checkpoint / name, manifest.size_of(name)
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise cannot_read(path, error) from None
        if size != expected:
            raise DamagedError(f"{path} has {size} bytes, not {expected}")


def without_checksums(checkpoint: Path) -> str:
    return f"{checkpoint} was saved by an earlier version without checksums, so damage to its tensors is not detected"


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint's folder; it may be damaged."""
    return may_exist(path / MANIFEST)


def may_exist(path: Path) -> bool:
    """Return whether something is at `path`; True also if this user may not look, which reading it then reports."""
    try:
        os.stat(path)
    except PermissionError:
        return True
    except (OSError, ValueError):  # also if the name is too long, or no file can have it
        return False
    return True


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder` by step, also links whose target is missing; none if there is no folder.

    An InputError says that `folder` cannot be read: a run must not start over because a disk is not mounted.
    """
    try:
        names = os.listdir(folder)
    except ValueError:  # no folder can have this name
        return []
    except OSError as error:
        if not os.path.lexists(folder):
            return []
        raise InputError(
            f"checkpoint: {folder} is there, but cannot be read ({error.strerror}); mount or make what it links to, "
            f"correct its permissions, or give another run"
        ) from None
    named = (folder / name for name in names if _STEP.fullmatch(name))
    return sorted((path for path in named if not os.path.isfile(path)), key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def same_checkpoint(folder: Path, path: Path) -> Path | None:
    """Return the checkpoint in `folder` that `path` refers to, possibly through a link; None if it is elsewhere."""
    found = checkpoint_folders(folder) if path.exists() else []
    return next((each for each in found if os.path.exists(each) and each.samefile(path)), None)


def newest_first(folder: Path) -> tuple[dict[Path, Manifest], list[Path]]:
    """Return checkpoint -> manifest for `folder`, last save first, and the checkpoints whose manifest is unreadable."""
    manifests, unreadable = dict[Path, Manifest](), list[Path]()
    for path in checkpoint_folders(folder):
        try:
            manifests[path] = read_manifest(path)
        except InputError:
            unreadable.append(path)
    return dict(sorted(manifests.items(), key=lambda item: -item[1].saved)), unreadable[::-1]


def last_saves_first(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, last save first.

    A checkpoint whose manifest is unreadable does not tell when it was saved: it counts as the last save if its step
    exceeds the last readable one's, else as the first.
    """
    return _in_order(*newest_first(folder))


def _in_order(manifests: Mapping[Path, Manifest], unreadable: Sequence[Path]) -> list[Path]:
    last = next((_step_of(path) for path in manifests), -1)  # their first is the last save
    later = [path for path in unreadable if _step_of(path) > last]
    return [*later, *manifests, *unreadable[len(later) :]]


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the last save in `folder`, see `last_saves_first`; None if there is none."""
    return next(iter(last_saves_first(folder)), None)


def locate_checkpoint(path: Path, key: str, others: str = "") -> Path:
    """Return `path` if it is a checkpoint; for a run's folder, its last save. Warns of others that are unreadable.

    An InputError names the option `key`, and the `others` among the folders that it takes, as "one of .., ".
    """
    if is_checkpoint(path):
        return path
    manifests, unreadable = newest_first(path / "checkpoints")
    if found := _in_order(manifests, unreadable):
        newest = found[0]
        for each in unreadable:
            if each != newest:
                log.warning(
                    "%s: %s cannot be read (see `checkpoint verify`); taking %s as the newest", key, each, newest
                )
        return newest
    runs = sorted(str(each.parent) for each in path.glob("*/checkpoints") if newest_checkpoint(each))
    cure = (
        f"give one of the runs in it, such as {runs[0]}"
        if runs
        else f"give a folder named step_<N>, {others}or a run's folder"
    )
    raise InputError(f"{key}: {str(path)!r} is neither a checkpoint nor the folder of a run with one; {cure}")


def encoded_of(checkpoint: Path) -> Encoded | None:
    """Return the encoding in a checkpoint; None if its training samples had none, or an earlier version saved it."""
    digest = read_manifest(checkpoint).encoding
    return Encoded(checkpoint / FOLDER, digest) if digest else None


def differences(manifest: Manifest, shape: dict[str, Any]) -> str:
    had = manifest.shape
    return "; ".join(
        f"{key} {_short(had.get(key))}, this run has {_short(has)}" for key, has in shape.items() if had.get(key) != has
    )


def check_fits(
    path: Path,
    manifest: Manifest,
    shape: dict[str, Any],
    settings: dict[str, Any],
    changed: bool = False,
    encoded: Encoded | None = None,
) -> None:
    """Check that a run of `shape` (`checkpoint_shape`) and `settings` (`trained_with`) can resume from `path`.

    If they differ, or its samples have another encoding than `encoded`, an InputError lists the differences. If
    `changed`, the settings may differ, but nothing else.
    """
    samples = str(encoded.folder.parent) if encoded else "data.path"
    if other := other_encoding(samples, encoded, f"the samples that {path} was trained with", manifest.encoding, path):
        raise InputError(f"checkpoint.resume: {other}")
    if APPLIED in manifest.about:
        raise InputError(
            f"checkpoint.resume: {path} has no optimizer states, since `delta apply` wrote it; resume from a "
            f"checkpoint that training saved"
        )
    if differing := differences(manifest, shape):
        raise InputError(
            f"checkpoint.resume: {path} has {differing}; use the same, or start over with --checkpoint.resume never "
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
            f"checkpoint.resume: {path} was trained with {changes}; restore these values, accept the change with "
            f"--checkpoint.allow_config_mismatch true, or start over with another --log.name"
        )
    if changes:
        log.info("resume: %s was trained with %s", path, changes)


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)  # as configurations have it
    return text if len(text) <= 80 else text[:77] + "..."
