"""TensorBoard: a run's curves, and, as text, its configuration, plan and environment."""

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.utils.tensorboard.writer import SummaryWriter

log = logging.getLogger("dlrm_overlap")


class TensorBoard:
    """Writes the events of one run. All runs use the same tags, so the curves of runs side by side overlay.

    If they cannot be written, as on a full disk, the run warns and goes on without them. Scalars and texts are in the
    file when their call returns: the writer's thread opens it by name for each event, and by then another run's folder
    may have this name.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        """Begin after `start_step`, with 0 instead of the events in `folder`."""
        if start_step == 0:
            for old in folder.glob("events.out.tfevents.*"):  # an earlier run's curves would mix with this one's
                old.unlink()
        # Where a run goes on, TensorBoard hides later events of before it stopped.
        first = start_step + 1 if start_step else None
        self._writer: SummaryWriter | None = SummaryWriter(str(folder), purge_step=first)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write every finite value of `values` under its tag, such as `train/loss`."""
        for tag, value in values.items():
            if math.isfinite(value):
                self._write(lambda writer, tag=tag, value=value: writer.add_scalar(tag, value, step))
        self._write(SummaryWriter.flush)

    def text(self, tag: str, markdown: str) -> None:
        """Write a Markdown text."""
        self._write(lambda writer: [writer.add_text(tag, markdown), writer.flush()])

    def close(self) -> None:
        """Flush and close the events file."""
        self._write(lambda writer: writer.close())

    def _write(self, write: Callable[[SummaryWriter], object]) -> None:
        if self._writer is None:
            return
        try:
            write(self._writer)
        except OSError as error:  # of its thread, which has ended: no later event would be written
            log.warning("TensorBoard: events cannot be written (%s); the run goes on without", error.strerror)
            self._writer = None
