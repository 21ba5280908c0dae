"""The files of a run's results: lines of `metrics.jsonl`, files that are written whole or not at all."""

import errno
import json
import math
import os
from itertools import count
from pathlib import Path
from typing import Any

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.files import LOCK_NAME, replacing

_EARLIER = "earlier_"


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, NaN written as null."""

    def __init__(self, path: Path, keep_up_to_step: int) -> None:
        """Open `path` to append, without its lines past `keep_up_to_step`, which a resumed run writes again.

        A line that is not whole, as a crash leaves it, is left out.

        Raises:
            InputError: if it cannot be read or written.
        """
        kept = path.read_text(errors="replace").splitlines() if keep_up_to_step and path.exists() else []
        write_atomically(path, "".join(f"{line}\n" for line in kept if 0 < _step_of(line) <= keep_up_to_step))
        self._path, self._file = path, path.open("ab", buffering=0)

    @property
    def is_in_place(self) -> bool:
        """Whether the file still has its name: nobody has removed, moved or replaced it, or its folder."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def write(self, record: dict[str, Any]) -> None:
        """Append `record`.

        Raises:
            OSError: if there is no room for it; the file is then as it was.
        """
        line, end = (json.dumps(nan_as_none(record)) + "\n").encode(), self._file.seek(0, os.SEEK_END)
        if self._file.write(line) < len(line):
            self._file.truncate(end)  # or else the next line would be joined to this one's beginning
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step_of(line: str) -> int:
    """Return the step of a line of `metrics.jsonl`, 0 where it is not whole."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return 0


def nan_as_none(value: Any) -> Any:
    """Return `value` with None for every NaN and infinity in it, which JSON cannot hold."""
    if isinstance(value, dict):
        return {k: nan_as_none(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to `path`, so that a reader finds the old file or the new one, and never half of one.

    Raises:
        InputError: if it cannot be written, as on a full disk; the old file is still there then.
    """
    try:
        with replacing(path) as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InputError(
            f"log.dir: {path} cannot be written ({error.strerror}); make room, or give another folder"
        ) from error


def has_results(folder: Path) -> bool:
    """Return whether a run has written results to `folder`."""
    metrics = folder / "metrics.jsonl"
    return (folder / "summary.json").exists() or (metrics.exists() and metrics.stat().st_size > 0)


def set_aside(folder: Path) -> Path | None:
    """Move the content of `folder`, whose lock this process holds, to a new folder in it; None if it is empty.

    Folders of earlier moves, `earlier_1` and so on, stay.

    Raises:
        InputError: if it cannot be moved.
    """
    found = [path for path in folder.iterdir() if path.name != LOCK_NAME and not path.match(f"{_EARLIER}*")]
    if not found:
        return None
    aside = next(path for n in count(1) if not (path := folder / f"{_EARLIER}{n}").exists())
    try:
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)
    except OSError as error:
        raise InputError(f"log.dir: {folder} cannot be written to ({error.strerror}); give another folder") from None
    return aside


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of the finished run in `folder` as `RunLog.summary` returned it, or None without one.

    The file holds null for a number that was NaN or infinite; here it is NaN.
    """
    path = folder / "summary.json"
    if not path.exists():
        return None
    return {key: math.nan if value is None else value for key, value in json.loads(path.read_bytes()).items()}
