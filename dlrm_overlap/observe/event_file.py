"""A file that TensorBoard shows.

The caller's thread writes it. TensorBoard's own writer has a thread that ends for good when the disk is full.
"""

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue] # generated
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] # generated
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import text

from dlrm_overlap.observe.result_files import append

_PREFIX = "events.out.tfevents."


class EventFile:
    """A new event file. If the disk is full, a method raises an OSError, and the file keeps the earlier events."""

    def __init__(self, folder: Path, start: int, evaluates: bool = False) -> None:
        """Open a file in `folder`. TensorBoard then hides earlier files' events of steps after `start`.

        If the run `evaluates` the state after this step again, those of this step are hidden, too.
        """
        # TensorBoard reads files in the order of their names, so later than all, even if the clock has gone back.
        number = max([int(time.time()), *(earlier + 1 for earlier in _numbers(folder))])
        name = f"{_PREFIX}{number:010}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = (folder / name).open("ab", buffering=0)
        self._records = RecordWriter(self)
        self._add(file_version="brain.Event:2")
        if start:
            self._add(step=start + 1 - evaluates, session_log=SessionLog(status=SessionLog.START))

    def add_text(self, tag: str, content: str) -> None:
        self._add(summary=text(tag, content))

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        found = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(step=step, summary=Summary(value=found))

    def _add(self, **event: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **event).SerializeToString())

    def write(self, record: bytes) -> None:
        """Append a record, for the `RecordWriter`."""
        append(self._file, record)

    def close(self) -> None:
        self._file.close()


def _numbers(folder: Path) -> list[int]:
    """Return the times in the names of event files in `folder`, as seconds since 1970."""
    times = (path.name.removeprefix(_PREFIX).partition(".")[0] for path in folder.glob(f"{_PREFIX}*"))
    return [int(each) for each in times if re.fullmatch("[0-9]{10}", each)]
