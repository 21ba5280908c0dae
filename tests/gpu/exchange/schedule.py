"""When and on which GPUs each check runs: in lanes, each of which runs its checks one after the other."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from tests.gpu.exchange.pairs import why_all
from tests.gpu.exchange.place import Check
from tests.gpu.exchange.ranks import Ranks

PAIR = 2


class Result(NamedTuple):
    """How a check went."""

    told: str | None
    """ok, or what went wrong; None where the time for all checks was over"""
    seconds: float = 0.0
    lane: str = ""


@dataclass(frozen=True)
class Lane:
    """Ranks that run checks one after the other, from a queue that several lanes may share."""

    name: str
    ranks: Ranks
    queue: "SimpleQueue[str]"


class Schedule:
    """Runs checks in the background: those of two ranks at the same time on pairs of GPUs, then those of all ranks.

    Four ranks or more, each with a GPU of its own, are divided into pairs. Otherwise all checks run on all ranks.
    """

    def __init__(
        self,
        checks: Mapping[str, Check],
        world_size: int,
        ranks_per_gpu: int,
        make_folder: Callable[[], Path],
        budget_s: float,
        left: Path | None = None,
    ) -> None:
        """Start the first checks.

        Args:
            checks: by name; those that run alone are the last of their lane.
            world_size: number of all ranks.
            ranks_per_gpu: ranks that share a GPU.
            make_folder: makes a new folder for the logs of a set of ranks.
            budget_s: seconds for all checks.
            left: file that names the checks that have not passed yet, kept up to date.
        """
        self.checks, self.ranks_per_gpu = checks, ranks_per_gpu
        self._results = {name: Future[Result]() for name in checks}
        self._left, self._lock, self._make_folder = left, threading.Lock(), make_folder
        self._began, self._stopped = time.monotonic(), False
        self._deadline = self._began + budget_s
        pairs = world_size // PAIR if ranks_per_gpu == 1 and world_size >= 2 * PAIR else 0
        ordered = sorted(checks, key=lambda name: checks[name].alone)
        paired = [name for name in ordered if pairs and not why_all(name)]
        gpus = {f"ranks {PAIR * i} and {PAIR * i + 1}": range(PAIR * i, PAIR * (i + 1)) for i in range(pairs)}
        self._phases = [
            self._lanes(paired, gpus, PAIR),
            self._lanes([name for name in ordered if name not in paired], {"all ranks": ()}, world_size),
        ]
        self._note_left()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _lanes(self, names: Sequence[str], gpus: Mapping[str, Sequence[int]], size: int) -> list[Lane]:
        """Return lanes of `size` ranks that share a queue of checks, on the GPUs that each one's name has."""
        queue = SimpleQueue[str]()
        for name in names:
            queue.put(name)
        alone = -(-sum(self.checks[name].alone for name in names) // max(1, len(gpus)))
        given = size, self.ranks_per_gpu, self._folder, self._deadline, alone
        return [Lane(lane, Ranks(*given, each), queue) for lane, each in gpus.items() if names]

    def _folder(self) -> Path:
        with self._lock:
            return self._make_folder()

    def _run(self) -> None:
        if torch.cuda.is_available() and any(not check.alone for check in self.checks.values()):
            for lane in self._phases[-1]:  # its ranks start while those of the pairs do
                lane.ranks.lasting()
        for phase in self._phases:
            lanes = [threading.Thread(target=self._run_lane, args=[lane], daemon=True) for lane in phase]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
        for result in self._results.values():
            if not result.done():
                result.set_result(Result(None))

    def _run_lane(self, lane: Lane) -> None:
        try:
            with suppress(Empty):
                while not self._stopped:
                    name, began = lane.queue.get_nowait(), time.monotonic()
                    told = lane.ranks.run(name, self.checks[name])
                    self._results[name].set_result(Result(told, time.monotonic() - began, lane.name))
                    self._note_left()
        finally:
            lane.ranks.close()

    def _note_left(self) -> None:
        if self._left is not None:
            with self._lock:
                self._left.write_text("".join(f"{name}\n" for name in self.left()))

    def result(self, name: str) -> Result:
        """Wait until a check has run, or the time for all is over, and return how it went."""
        return self._results[name].result()

    def left(self) -> list[str]:
        """Return the checks that have not passed: those that failed or did not run."""
        return [name for name, found in self._results.items() if not found.done() or found.result().told != "ok"]

    def report(self, slowest: int = 10) -> list[str]:
        """Return lines that say how long the checks took and which did not run."""
        done = {name: found.result() for name, found in self._results.items() if found.done()}
        ran = {name: result for name, result in done.items() if result.told is not None}
        lines = [f"{len(ran)} of {len(self.checks)} checks ran in {time.monotonic() - self._began:.0f} s"]
        for lane in dict.fromkeys(result.lane for result in ran.values()):
            times = [result.seconds for result in ran.values() if result.lane == lane]
            lines.append(f"{lane}: {len(times)} checks in {sum(times):.0f} s")
        lines += [f"the {min(slowest, len(ran))} slowest:"]
        for name in sorted(ran, key=lambda name: -ran[name].seconds)[:slowest]:
            lines.append(f"{ran[name].seconds:7.1f} s  {name}, {ran[name].lane}")
        if missing := [name for name in self.checks if name not in ran]:
            lines.append(f"{len(missing)} did not run: {' '.join(missing)}")
        return lines

    def close(self) -> None:
        """End all ranks; checks that have not begun do not run."""
        self._stopped = True
        for phase in self._phases:
            for lane in phase:
                lane.ranks.close()
        self._thread.join(10.0)
