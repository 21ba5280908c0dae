"""The manifest of a checkpoint, `checkpoint.json`: its tensors, its origin, and a checksum of every file.

It is written last, and its own last line is a checksum of the lines above. Loads no torch.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm_overlap.config import InputError, in_one_line

FORMAT = 2
MANIFEST = "checkpoint.json"
_CHECKSUM = ',\n "sha256": "'
_CHUNK_BYTES = 1 << 24


class DamagedError(InputError):
    """A checkpoint is damaged. The message names the file and the fault."""


@dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Piece:
    """The elements [offsets, offsets + sizes) of a tensor, as `name` in `file`."""

    file: str
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the unsharded model or of its optimizer.

    Of row-wise Adagrad's state the shape is that of the table, [rows, D], and `per_row` is true: a piece of sizes
    (r, c) is stored as r numbers, one for the c columns of each row that it stands for.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    per_row: bool = False


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
    line: tuple[int, ...] = ()
    """steps of the checkpoints of its folder that led here, oldest first, its own the last"""
    parent: str | None = None
    """the checkpoint that was saved or loaded before, by its name in this folder or its path elsewhere"""
    metrics: dict[str, float] = field(default_factory=dict)
    """of the evaluation after this step, if there was one"""
    about: dict[str, Any] = field(default_factory=dict)
    """for readers: the resolved configuration, the plan, the number of ranks"""
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    format: int = FORMAT


def dump_manifest(manifest: Manifest) -> str:
    """Return the text of `manifest`, whose last line is the checksum of those above."""
    head = json.dumps(dataclasses.asdict(manifest), indent=1).rstrip("}\n")
    return head + _tail(head)


def _tail(head: str) -> str:
    return f'{_CHECKSUM}{hashlib.sha256(head.encode()).hexdigest()}"\n}}\n'


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of the folder `checkpoint`.

    Raises:
        DamagedError: if it cannot be read or was changed.
        InputError: if it is of the format of another version of this program.
    """
    path = checkpoint / MANIFEST
    try:
        text = path.read_text()
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("no object")
        head = text.rpartition(_CHECKSUM)[0]
        if text != head + _tail(head):
            raise ValueError("its checksum is another")
        if (version := content["format"]) != FORMAT:
            raise InputError(f"{path} has format {version}, and this program knows {FORMAT}; use the one that wrote it")
        return _from_json(content)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise DamagedError(f"{path} is not what was written ({in_one_line(error):.80})") from None


def _from_json(content: dict[str, Any]) -> Manifest:
    content.pop("sha256")
    content["line"] = tuple(content["line"])
    content["files"] = {name: StoredFile(**about) for name, about in content["files"].items()}
    content["tensors"] = {
        name: StoredTensor(
            about["dtype"],
            tuple(about["shape"]),
            tuple(Piece(p["file"], p["name"], tuple(p["offsets"]), tuple(p["sizes"])) for p in about["pieces"]),
            about["per_row"],
        )
        for name, about in content["tensors"].items()
    }
    manifest = Manifest(**content)
    for name in manifest.files:
        if Path(name).name != name or name in (".", ".."):
            raise ValueError(f"{name!r} is not the name of a file")
    if lost := {piece.file for each in manifest.tensors.values() for piece in each.pieces} - manifest.files.keys():
        raise ValueError(f"file {min(lost)} is not listed")
    return manifest


def check_file(path: Path, expected: StoredFile, tick: Callable[[], None] = lambda: None) -> None:
    """Check that `path` is the file that was written, and call `tick` for each 16 MB of it.

    Raises:
        DamagedError: if it is not there, or has another size or checksum.
    """
    try:
        if (size := path.stat().st_size) != expected.bytes:
            raise DamagedError(f"{path} has {size} bytes, not {expected.bytes}")
        checksum = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                checksum.update(chunk)
                tick()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from None
    if checksum.hexdigest() != expected.sha256:
        raise DamagedError(f"{path} is not what was written (its checksum is another)")


def write_synced(path: Path, text: str) -> None:
    """Write `text` to `path` and sync it."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
