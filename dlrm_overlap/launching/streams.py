"""Standard streams whose failures do not end a command: closed, on a full disk, or without a reader."""

import errno
import io
import os
import select
import sys
from typing import Any, TextIO

from dlrm_overlap.launching.lifetime import say


def open_streams() -> None:
    """Replace closed standard streams by `/dev/null`, and ignore failures to write to, or encode for, the others."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free descriptor, this one
    sys.stdout, sys.stderr = _wrap(1, sys.stdout), _wrap(2, sys.stderr)


def _wrap(descriptor: int, stream: TextIO | Any) -> TextIO:
    """Return a stream that writes to `descriptor` in the manner of `stream` (None if closed), and never fails."""
    names = ("encoding", "errors", "line_buffering", "write_through")
    as_before = {name: getattr(stream, name) for name in names if hasattr(stream, name)}
    if as_before.get("errors") == "strict":  # a name that the encoding lacks would end a command that is done
        as_before["errors"] = "backslashreplace"
    if as_before.get("write_through"):  # PYTHONUNBUFFERED, which turns line buffering off: the buffer below has lines
        as_before["line_buffering"] = True
    return io.TextIOWrapper(io.BufferedWriter(_Output(descriptor, "w", closefd=False)), **as_before)


class _Output(io.FileIO):
    _failed = False

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # a full, non-blocking pipe
                select.select([], [self], [])
            return written
        except OSError as error:
            if not self._failed and error.errno != errno.EPIPE:  # a reader may close early, as `head` does
                say(f"dlrm-overlap: part of this command's output is lost ({error.strerror})")
            self._failed = True
            return len(data)
