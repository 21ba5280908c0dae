"""Files of a run's results: `metrics.jsonl`, and files that are replaced atomically."""

import contextlib
import errno
import json
import logging
import math
import os
import sys
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

from dlrm_overlap.config import InputError, in_one_line
from dlrm_overlap.launching.files import LOCK_NAME, open_file, replacing

log = logging.getLogger("dlrm_overlap")

_EARLIER = "earlier_"
_RESULTS = ("train_loss", "eval_loss", "eval_auroc", "eval_ne", "samples_per_s", "step_ms_p50", "step_ms_p95")


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, with null for NaN."""

    def __init__(self, path: Path, keep_up_to_step: int, evaluates: bool = False) -> None:
        """Open `path` to append; first drop damaged lines and the lines of steps after `keep_up_to_step`.

        If the run `evaluates` the state after this step again, the earlier evaluation's line is dropped, too.
        """
        lines = _whole_lines(path) if keep_up_to_step else []
        last_evaluation = keep_up_to_step - evaluates
        kept = [
            line
            for line, record in lines
            if record["step"] <= (last_evaluation if "eval/loss" in record else keep_up_to_step)
        ]
        write_atomically(path, "".join(f"{line}\n" for line in kept))
        self._path, self._file = path, path.open("ab", buffering=0)

    @property
    def is_in_place(self) -> bool:
        """Return False if the file or its folder was removed, moved or replaced."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def write(self, record: dict[str, Any]) -> None:
        """Append `record`, see `append`."""
        append(self._file, (json.dumps(nan_as_none(record)) + "\n").encode())

    def close(self) -> None:
        self._file.close()


def append(file: FileIO, data: bytes) -> None:
    """Append `data`; if the disk is full, raise an OSError and leave the file unchanged."""
    end = file.seek(0, os.SEEK_END)
    if file.write(data) < len(data):
        file.truncate(end)  # remove the incomplete end
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_records(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in _whole_lines(path)]


def _whole_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    if not path.is_file():  # missing, or a pipe, which would block
        return []
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise InputError(f"log.dir: {path} cannot be read ({error.strerror}); give another folder") from None
    found, damaged = [], []
    for number, line in enumerate(filter(None, lines), 1):
        try:
            record = json.loads(line, parse_constant=_refuse)
            if type(record["step"]) is not int or record["step"] < 1:
                raise ValueError(f"step {record['step']!r:.40}")
            found.append((line, record))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            damaged.append(f"line {number}: {in_one_line(error):.80}")
    if damaged:
        lines_read = len(found) + len(damaged)
        log.warning("%s: %d of %d lines are damaged and skipped (%s)", path, len(damaged), lines_read, damaged[0])
    return found


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def nan_as_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: nan_as_none(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` atomically; an InputError if it cannot be written, and the old file stays."""
    try:
        with replacing(path) as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InputError(
            f"log.dir: {path} cannot be written ({error.strerror}); free disk space, or give another folder"
        ) from error


def has_results(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return (folder / "summary.json").exists() or (metrics.exists() and metrics.stat().st_size > 0)


def set_aside(folder: Path) -> Path | None:
    """Move the content of `folder`, whose lock this process holds, to a subfolder earlier_<N>; None if it is empty.

    If something cannot be moved, an InputError says so, and all stays where it was.
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
        with contextlib.suppress(OSError):
            for path in list(aside.iterdir()):
                path.rename(folder / path.name)
            aside.rmdir()
        raise InputError(
            f"log.dir: the contents of {folder} cannot be moved to {aside} ({error.strerror}: {error.filename}); give "
            f"another folder"
        ) from None
    return aside


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a run, with NaN for null; None if it is missing or, with a warning, damaged."""
    path = folder / "summary.json"
    try:
        with open_file(path) as file:
            summary = json.load(file, parse_constant=_refuse)
        if type(summary["steps"]) is not int or summary["steps"] < 0:
            raise ValueError(f"steps {summary['steps']!r:.40}")
        for key in (*_RESULTS, *(key for key in summary if key.startswith("eval_") and "/" in key)):
            if summary[key] is not None and not is_number(summary[key]):
                raise ValueError(f"{key} {summary[key]!r:.40}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        log.warning("%s is damaged (%s) and ignored", path, in_one_line(error)[:80])
        return None
    return {key: math.nan if value is None else value for key, value in summary.items()}


def remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"log.dir: {path} cannot be removed ({error.strerror}); move it, or give another folder"
        ) from None
