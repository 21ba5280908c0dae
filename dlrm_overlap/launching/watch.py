"""A thread beside each rank, which ends a run that stands still and names the rank that it waits for.

A collective that waits for a peer knows neither which one is missing nor the step; one within a CUDA graph is not even
bounded. So every rank writes its step and call to the store, some twenty times in a timeout. A rank that has not moved
for longer than the timeout reads those of the others. A rank that writes nothing new is stopped or gone; if all write,
each line shows where that rank is. This is the same for gloo, NCCL and our kernels.
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
"""a rank is ended after so many timeouts, so that an exchange whose own wait expires names its slice first"""
_POLL_S = 0.5
_SHOWN_RANKS = 8
_SILENT = "it is stopped, or its node is gone or cut off"


class Progress:
    """A rank's step and batch, which the training loop writes."""

    def __init__(self) -> None:
        self.step = 0
        """the training step under way, or after which the run evaluates or saves"""
        self.batch = 0
        """batches evaluated since, and pieces of a checkpoint read or written"""
        self.is_over = False
        """whether the work is done, so that this rank waits for no other any more"""

    def tick(self) -> None:
        """Count a batch evaluated, or a piece of a checkpoint."""
        self.batch += 1


class Watch:
    """Watches the thread that makes it, as rank `rank` of `world_size`; a run of one rank needs none."""

    def __init__(
        self,
        store: "dist.Store",  # pyright: ignore[reportPrivateImportUsage]
        rank: int,
        world_size: int,
        timeout_s: float,
        progress: Progress | None = None,
    ) -> None:
        """Start watching.

        Args:
            store: all ranks' store, through a connection that nobody else waits on.
            rank: this rank.
            world_size: number of ranks, W.
            timeout_s: seconds that a rank may stay in one call of one step.
            progress: of this rank; a new one if None.
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
        """End the watching, before the ranks part."""
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
                deadline = self._new_deadline()  # it reads or writes a checkpoint, which takes as long as its disk does

    def _new_deadline(self) -> Deadline:
        return Deadline(SLACK * self._timeout_s, longest_s=max(2 * self._period_s, 1.0))

    def _beat(self, frame: FrameType) -> None:
        self._beats += 1
        self._beaten = time.monotonic()
        still_s = time.monotonic() - self._moved
        about = {"beats": self._beats, "step": self.progress.step, "still_s": still_s, "where": _where(frame)}
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0: `_end` says so, if it comes to that
            self._store.set(_key(self._rank), json.dumps(about))

    def _end(self, lines: list[str], answering: list[int], stood_s: float) -> NoReturn:
        """Say which ranks are silent and where the others are, and end this process."""
        if self._rank != min(answering, default=self._rank):
            time.sleep(HOLD_BACK_S)
        head = f"dlrm-overlap: rank {self._rank} has stood still in step {self.progress.step} for {stood_s:.0f} s"
        tail = f"the bound is embedding.wait_timeout_s, {self._timeout_s:g} s: raise it if the silent rank is only slow"
        print("\n".join([f"{head}:", *(f"  {line}" for line in lines), f"  {tail}"]), file=sys.stderr, flush=True)
        os._exit(1)

    def _diagnose(self) -> tuple[list[str], list[int], bool]:
        """Return a line for each rank, the silent ones first, the ranks that answer, and whether another one moves.

        A rank moves if it was in another call half a timeout ago.
        """
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
        """Return each rank's last beat, "" for none yet, or None if the store does not answer."""
        found: list[list[str]] = []

        def read() -> None:
            keys = [_key(rank) for rank in range(self._world_size)]
            with contextlib.suppress(RuntimeError):
                found.append([self._store.get(key).decode() if self._store.check([key]) else "" for key in keys])

        # In a thread of its own, since a store whose server is stopped waits for ever, whatever its timeout.
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(max(1.0, self._timeout_s / 20))
        return found[0] if found else None


def _key(rank: int) -> str:
    return f"dlrm_overlap/watch/{rank}"


def _instructions(frame: FrameType | None) -> tuple[int, ...]:
    """Return numbers that stay the same as long as the thread is in the same calls, at the same instructions."""
    numbers = []
    while frame is not None:
        numbers += [id(frame.f_code), frame.f_lasti]
        frame = frame.f_back
    return tuple(numbers)


def _where(frame: FrameType) -> str:
    """Return the innermost call, and the innermost of this package, from which it came."""
    ours: FrameType | None = frame
    while ours is not None and not ours.f_globals.get("__name__", "").startswith("dlrm_overlap"):
        ours = ours.f_back
    text = f"in {_call(frame)}"
    return f"{text}, from {_call(ours)}" if ours not in (None, frame) else text


def _call(frame: FrameType | None) -> str:
    assert frame is not None
    return f"{frame.f_code.co_qualname} ({frame.f_globals.get('__name__')}, line {frame.f_lineno})"
