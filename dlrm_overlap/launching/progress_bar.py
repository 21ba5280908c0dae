"""Shows how far a command is on standard error: a bar on a terminal, else a line every ten seconds."""

import sys
from contextlib import AbstractContextManager
from typing import Any, TextIO

from tqdm import tqdm

_LINE_EVERY_S = 10.0


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """Counts rows, and shows their number, rows per second and the time left; without a terminal, only from 10 s on."""

    def __init__(self, title: str, total: int | None, unit: str = "rows") -> None:
        """Show the bar, on a terminal. `total` is the number of rows, None if unknown; see `estimate`."""
        self.count, self._is_estimated = 0, total is None
        about = "about " if self._is_estimated else ""
        numbers = f"{{n_fmt}} of {about}{{total_fmt}} {unit}, {{rate_fmt}}, {{remaining}} left"
        style: dict[str, Any] = {
            "file": sys.stderr,
            "bar_format": f"{{l_bar}}{{bar}}| {numbers}",
            "dynamic_ncols": True,
        }
        if not sys.stderr.isatty():
            style = {"file": _Lines(sys.stderr), "bar_format": f"{{desc}}: {{percentage:.0f}}%, {numbers}"}
            style |= {"delay": _LINE_EVERY_S, "mininterval": _LINE_EVERY_S}
        self._bar = _Bar(desc=title, total=total, unit=f" {unit}", unit_scale=True, miniters=1, **style)

    def estimate(self, total: float) -> None:
        """Take `total` as the number of rows, unless it is known."""
        if self._is_estimated:
            self._bar.total = max(round(total), self.count)

    def advance(self, rows: int) -> None:
        self.count += rows
        self._bar.update(rows)

    def __exit__(self, error: object, *_: object) -> None:
        if error is None and self._is_estimated:
            self._bar.total = self.count
        self._bar.close()


class _Bar(tqdm):
    monitor_interval = 0  # no thread, as commands fork


class _Lines:
    """Writes each state of a bar as a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if text := text.strip():
            self._stream.write(f"{text}\n")

    def flush(self) -> None:
        self._stream.flush()
