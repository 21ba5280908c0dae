"""How much of a figure is done and how long the rest will take: told on rank 0, between measurements."""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger("dlrm_overlap")

T = TypeVar("T")

_LINE_EVERY_S = 10.0


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """Yield `items`, and tell on rank 0 how many are done and how much time is left.

    On a terminal that is a progress bar. It is drawn anew only when an item is done, by this thread, so that nothing of
    it runs beside a measurement. Elsewhere it is a line in the log, not more often than every 10 seconds.

    Args:
        what: the items are, in the plural, such as "shapes".
        items: what is measured one after the other, each taking about as long.
    """
    if dist.is_initialized() and dist.get_rank():
        yield from items
    elif (console := _terminal()) is not None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
            task = bar.add_task(what, total=len(items))
            bar.refresh()
            for item in items:
                yield item
                bar.update(task, advance=1, refresh=True)
    else:
        yield from _told_by_lines(what, items)


def _told_by_lines(what: str, items: Sequence[T]) -> Iterator[T]:
    began = told = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - told >= _LINE_EVERY_S and done < len(items):
            told = now
            left_s = (now - began) / done * (len(items) - done)
            log.info("%d of %d %s, about %.0f s left", done, len(items), what, left_s)


def _terminal() -> Console | None:
    """Return the terminal that the log is written to, which keeps its lines and the bar apart, or None."""
    return next((each.console for each in log.handlers if isinstance(each, RichHandler)), None)
