"""A thread on each rank that ends a run that makes no progress, and names the rank that it waits for.

Every rank regularly writes its step and current call to the store. A rank that has not moved for longer than the
timeout reads what the other ranks wrote; a rank that writes nothing is stopped or gone.
"""

import contextlib
import json
import os
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from dlrm_overlap.comm.deadline import Deadline
from dlrm_overlap.launching.lifetime import HOLD_BACK_S

if TYPE_CHECKING:
    import torch.distributed as dist

SLACK = 1.1
"""factor on the timeout, so that a wait of the embedding exchange expires first"""
_POLL_S = 0.5
_SHOWN_RANKS = 8
_SILENT = "it is stopped, or its machine is gone or cut off"


class Progress:
    def __init__(self) -> None:
        self.step = 0
        self.batch = 0
        """number of batches evaluated and of checkpoint pieces processed"""
        self.is_over = False
        """whether this rank no longer waits for others"""

    def tick(self) -> None:
        self.batch += 1


class Watch:
    """Watches the thread that creates it, as rank `rank` of at least two."""

    def __init__(
        self,
        store: "dist.Store",  # pyright: ignore[reportPrivateImportUsage]
        rank: int,
        world_size: int,
        timeout_s: float,
        progress: Progress | None = None,
    ) -> None:
        """Start to watch the current thread. No other thread may use `store`, a client of the ranks' store, to wait.

        `timeout_s` limits the time that the thread may be in one call of one step.
        """
        self.progress = progress or Progress()
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s
        self._period_s = min(max(timeout_s / 20, 0.1), 5.0)
        self._watched = threading.get_ident()
        self._beats, self._beaten, self._moved = 0, 0.0, time.monotonic()
        self._closed = threading.Event()
        self._beat(sys._getframe())
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        here, deadline = None, self._new_deadline()
        while not self._closed.wait(min(self._period_s, _POLL_S)) and not self.progress.is_over:
            frame = sys._current_frames().get(self._watched)
            if frame is None:
                return  # the watched thread has ended
            if (now := (self.progress.step, self.progress.batch, _instructions(frame))) != here:
                here, deadline = now, self._new_deadline()
                self._moved = time.monotonic()
            if time.monotonic() - self._beaten >= self._period_s:
                self._beat(frame)
            del frame
            if deadline.is_over():
                lines, answering, moving = self._diagnose()
                if not moving:
                    self._end(lines, answering, deadline.waited_s)
                deadline = self._new_deadline()  # another rank moves: it may read or write a slow checkpoint

    def _new_deadline(self) -> Deadline:
        return Deadline(SLACK * self._timeout_s, longest_s=max(2 * self._period_s, 1.0))

    def _beat(self, frame: FrameType) -> None:
        self._beats += 1
        self._beaten = time.monotonic()
        still_s = time.monotonic() - self._moved
        about = {"beats": self._beats, "step": self.progress.step, "still_s": still_s, "where": _where(frame)}
        with contextlib.suppress(RuntimeError):  # rank 0 and its store may be gone, which `_end` reports
            self._store.set(_key(self._rank), json.dumps(about))

    def _end(self, lines: list[str], answering: list[int], still_s: float) -> NoReturn:
        if self._rank != min(answering, default=self._rank):
            time.sleep(HOLD_BACK_S)
        head = f"dlrm-overlap: rank {self._rank} has made no progress in step {self.progress.step} for {still_s:.0f} s"
        tail = f"the limit is embedding.wait_timeout_s, {self._timeout_s:g} s: raise it if the silent rank is only slow"
        print("\n".join([f"{head}:", *(f"  {line}" for line in lines), f"  {tail}"]), file=sys.stderr, flush=True)
        os._exit(1)

    def _diagnose(self) -> tuple[list[str], list[int], bool]:
        """Return a line per rank, silent ranks first; the ranks that answer; and whether another rank moves."""
        frame = sys._current_frames()[self._watched]
        here = f"rank {self._rank}: in step {self.progress.step}, {_where(frame)}"
        gone = [f"rank 0, which holds the ranks' store, does not answer: {_SILENT}", here], [], False
        if (before := self._read()) is None:
            return gone
        for _ in range(3):
            time.sleep(self._period_s)
            self._beat(frame)
        if (after := self._read()) is None:
            return gone
        answering = [rank for rank in range(self._world_size) if after[rank] and after[rank] != before[rank]]
        lines, others, moving = [], [], False
        for rank in range(self._world_size):
            beat: dict[str, Any] = json.loads(after[rank] or "{}")
            if rank in answering:
                others.append(f"rank {rank}: in step {beat['step']}, {beat['where']}")
                moving |= rank != self._rank and beat["still_s"] < self._timeout_s / 2
            elif beat:
                lines.append(f"rank {rank}: silent, last heard in step {beat['step']}: {_SILENT}")
            else:
                lines.append(f"rank {rank}: silent, and has not begun")
        if not lines:
            lines = ["no rank is silent"]
        return [*lines, *others][:_SHOWN_RANKS], answering, moving

    def _read(self) -> list[str] | None:
        """Return what each rank last wrote ("" for nothing yet), or None if the store does not answer."""
        found: list[list[str]] = []

        def read() -> None:
            keys = [_key(rank) for rank in range(self._world_size)]
            with contextlib.suppress(RuntimeError):
                found.append([self._store.get(key).decode() if self._store.check([key]) else "" for key in keys])

        # In a separate thread, since a store whose server is stopped ignores its timeout.
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(max(1.0, self._timeout_s / 20))
        return found[0] if found else None


def _key(rank: int) -> str:
    return f"dlrm_overlap/watch/{rank}"


def _instructions(frame: FrameType | None) -> tuple[int, ...]:
    """Return numbers that stay the same while the thread is at the same instructions."""
    numbers = []
    while frame is not None:
        numbers += [id(frame.f_code), frame.f_lasti]
        frame = frame.f_back
    return tuple(numbers)


def _where(frame: FrameType) -> str:
    """Return the innermost call, and the innermost of this package."""
    ours: FrameType | None = frame
    while ours is not None and not ours.f_globals.get("__name__", "").startswith("dlrm_overlap"):
        ours = ours.f_back
    text = f"in {_call(frame)}"
    return f"{text}, from {_call(ours)}" if ours not in (None, frame) else text


def _call(frame: FrameType | None) -> str:
    assert frame is not None
    return f"{frame.f_code.co_qualname} ({frame.f_globals.get('__name__')}, line {frame.f_lineno})"
