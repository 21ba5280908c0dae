"""A thread that writes files while training goes on."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.process_group import LAST_RESORT

Written = TypeVar("Written")
_LAST_WAIT_S = 10.0  # if the run ends by an error that other ranks may not have


class BackgroundWrites(Generic[Written]):
    """Writes by a thread, one at a time.

    `finish` frees what the thread was given, not the thread: to free pinned memory, PyTorch records an event on the
    stream that has used it. The main thread may be capturing that stream; a later allocation, which queries the event,
    then fails.
    """

    def __init__(self, name: str, wait_timeout_s: float) -> None:
        """Take the thread's name, and the time that `ended` waits if all ranks have its error."""
        self._thread = ThreadPoolExecutor(1, name)
        self._background: Future[Written] | None = None
        self._given: Sequence[Any] = ()
        """the arguments of `_background`"""
        self._group: dist.ProcessGroup | None = None
        """process group of the thread's collectives, see `_make_group`"""
        self._wait_timeout_s = wait_timeout_s

    def _make_group(self) -> None:
        """Make the process group of the thread; its timeout limits how long a rank may write after the others."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LAST_RESORT * self._wait_timeout_s))
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        self._group = group

    def _write_in_background(self, write: Callable[..., Written], *arguments: Any) -> Future[Written]:
        self._given = arguments
        self._background = self._thread.submit(lambda: write(*self._given))
        return self._background

    @property
    def failed(self) -> bool:
        """Whether the thread has failed; `finish` raises its error."""
        return self._background is not None and self._background.done() and self._background.exception() is not None

    def finish(self) -> None:
        """Wait for the thread, and raise its InputError on all ranks; a collective."""
        if self._background is not None:
            background, self._background = self._background, None
            try:
                background.result()
            finally:
                self._given = ()

    def ended(self, error: Exception) -> bool:
        """Wait for the thread before the run ends by `error`; return False if it has failed or has not finished."""
        if self._background is None:
            return True
        is_on_all_ranks = isinstance(error, InputError)  # else other ranks may have ended
        wait([self._background], self._wait_timeout_s if is_on_all_ranks else _LAST_WAIT_S)
        return self._background.done() and not self.failed
