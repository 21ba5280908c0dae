"""Standard streams that cannot end a command: they may be closed, on a full disk, or without a reader."""

import errno
import io
import os
import select
import sys
from typing import Any, TextIO

from dlrm_overlap.launching.lifetime import say


def open_streams() -> None:
    """Open `/dev/null` in place of each standard stream that is closed, and drop what cannot be written to the others.

    A file that is opened later would otherwise take the descriptor of a closed stream, and would receive what libraries
    write there.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free descriptor, this one
    sys.stdout, sys.stderr = _wrap(1, sys.stdout), _wrap(2, sys.stderr)


def _wrap(descriptor: int, stream: TextIO | Any) -> TextIO:
    """Return a stream that writes to `descriptor` as `stream`, which is None if that was closed, but never fails."""
    names = ("encoding", "errors", "line_buffering", "write_through")
    as_before = {name: getattr(stream, name) for name in names if hasattr(stream, name)}
    return io.TextIOWrapper(io.BufferedWriter(_Output(descriptor, "w", closefd=False)), **as_before)


class _Output(io.FileIO):
    _failed = False

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # a pipe that is full, and was made not to block
                select.select([], [self], [])
            return written
        except OSError as error:
            if not self._failed and error.errno != errno.EPIPE:  # a reader may leave early, as `head` does
                say(f"dlrm-overlap: what this command prints is lost in part ({error.strerror})")
            self._failed = True
            return len(data)
