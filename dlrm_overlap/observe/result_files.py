"""The files of a run's results: whole lines of `metrics.jsonl`, files that are written whole or not at all.

A damaged file of a finished run counts as none, with a warning.
"""

import json
import logging
import math
import os
from itertools import count
from pathlib import Path
from typing import Any

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.files import LOCK_NAME, replacing

log = logging.getLogger("dlrm_overlap")

_SHOWN = ("eval_auroc", "eval_ne", "samples_per_s", "step_ms_p50")  # of a summary, as the command ends
_EARLIER = "earlier_"


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, NaN written as null.

    A line is whole or not there. One that cannot be written, as on a full disk, is left out with a warning, and the run
    goes on: it is the checkpoint that must be written, and where it cannot be, saving it ends the run.
    """

    def __init__(self, path: Path, keep_up_to_step: int) -> None:
        """Open `path` to append, without its lines past `keep_up_to_step`, which a resumed run writes again.

        A line that is not whole, as a crash or a full disk leaves it, is left out with a warning.

        Raises:
            InputError: if it cannot be read or written.
        """
        kept = []
        if path.exists() and keep_up_to_step:
            try:
                lines = path.read_text(errors="replace").splitlines()
            except OSError as error:
                raise InputError(
                    f"log.dir: {path} cannot be read ({error.strerror}); move it away, and the run starts another"
                ) from None
            steps = [_step_of(line) for line in lines]
            if torn := steps.count(None):
                log.warning("%s: %d of %d lines are not whole, and left out", path, torn, len(lines))
            kept = [line for line, step in zip(lines, steps, strict=True) if step and step <= keep_up_to_step]
        write_atomically(path, "".join(line + "\n" for line in kept))
        self._path, self._lost = path, 0
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def write(self, record: dict[str, Any]) -> None:
        """Append `record`, or leave it out where that fails."""
        line = (json.dumps(nan_as_none(record)) + "\n").encode()
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            reason = "no room for the whole line"
        except OSError as error:
            written, reason = 0, error.strerror
        if written < len(line):
            os.ftruncate(self._file, size)  # or else the next line would be joined to this one's beginning
            if not self._lost:
                log.warning("%s: cannot be written (%s); the run goes on without these lines", self._path, reason)
            self._lost += 1

    def close(self) -> None:
        """Close the file."""
        if self._lost:
            log.warning("%s: %d lines could not be written, and are missing", self._path, self._lost)
        os.close(self._file)


def _step_of(line: str) -> int | None:
    """Return the step of a line of `metrics.jsonl`, None where it is not whole."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if type(step) is int else None


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
    try:
        content = json.loads(path.read_bytes())
        numbers = [content[key] for key in _SHOWN]
        if type(content["steps"]) is not int or not all(each is None or math.isfinite(each) for each in numbers):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        log.warning("%s is not what was written, and left out", path)
        return None
    return {key: math.nan if value is None else value for key, value in content.items()}
