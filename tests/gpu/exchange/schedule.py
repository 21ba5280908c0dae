"""When and on which GPUs each check runs: in lanes, each of which runs its checks one after another."""

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

from tests.gpu.exchange.place import Check
from tests.gpu.exchange.ranks import Ranks
from tests.gpu.exchange.room import why_all, why_exclusive

PAIR = 2
_SETS, _SETS_OF_PAIRS = 5, 2  # sets of ranks on each GPU at the same time, and how many of them are pairs


class Result(NamedTuple):
    outcome: str | None  # ok, or the error; None if the time for all checks was over
    seconds: float = 0.0
    lane: str = ""


@dataclass(frozen=True)
class Lane:
    """Ranks that run checks one after another, from a queue that several lanes may share."""

    name: str
    ranks: Ranks
    queue: "SimpleQueue[str]"


class Schedule:
    """Runs checks in the background, as many at the same time as they allow.

    If ranks have a GPU each, several sets of ranks share each GPU first: sets of all ranks and, of four or more ranks,
    pairs. Then checks that need GPUs for themselves run on pairs, and then on all ranks. Ranks that share a GPU, or
    have none and are fewer than four, run all checks one after another.
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
            left: file that is kept up to date with the names of the checks that have not passed.
        """
        self.checks, self.ranks_per_gpu = checks, ranks_per_gpu
        self._results = {name: Future[Result]() for name in checks}
        self._left, self._lock, self._make_folder = left, threading.Lock(), make_folder
        self._began, self._stopped = time.monotonic(), False
        self._deadline = self._began + budget_s
        self.phases = self._plan(world_size, world_size // PAIR if world_size >= 2 * PAIR else 0)
        self._note_left()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _plan(self, world_size: int, pairs: int) -> list[list[Lane]]:
        """Return the lanes that run at the same time, for each phase."""
        names = sorted(self.checks, key=lambda name: self.checks[name].alone)
        on_gpus = torch.cuda.is_available()
        if self.ranks_per_gpu > 1 or not (pairs or on_gpus):
            return [self._lanes({"all ranks": self._ranks(world_size, (), names)}, names)]
        shared = [name for name in names if not self.checks[name].alone and not why_exclusive(name)]
        on_pairs, on_all = _divided(shared, pairs)
        later_on_pairs, later_on_all = _divided([name for name in names if name not in shared], pairs)
        sets_of_pairs = (_SETS_OF_PAIRS if on_gpus else 1) if pairs else 0
        sets_of_all = _SETS - sets_of_pairs if on_gpus else 1
        of_pairs, of_all = dict[str, Ranks](), dict[str, Ranks]()
        for number in range(sets_of_pairs):
            for first in range(0, PAIR * pairs, PAIR):
                name = f"ranks {first}, {first + 1} (set {number})"
                of_pairs[name] = self._ranks(PAIR, range(first, first + PAIR), () if number else later_on_pairs, pairs)
        for number in range(sets_of_all):
            of_all[f"all ranks (set {number})"] = self._ranks(world_size, (), () if number else later_on_all)
        first_of_pairs, first_of_all = dict(list(of_pairs.items())[:pairs]), dict(list(of_all.items())[:1])
        return [
            self._lanes(of_pairs, on_pairs) + self._lanes(of_all, on_all),
            self._lanes(first_of_pairs, later_on_pairs),
            self._lanes(first_of_all, later_on_all),
        ]

    def _ranks(self, size: int, gpus: Sequence[int], names: Sequence[str], lanes: int = 1) -> Ranks:
        """Return the ranks of a lane; checks of `names` that run alone are divided over `lanes` lanes."""
        alone = -(-sum(self.checks[name].alone for name in names) // lanes)
        return Ranks(size, self.ranks_per_gpu, self._folder, self._deadline, alone, gpus)

    @staticmethod
    def _lanes(ranks: Mapping[str, Ranks], names: Sequence[str]) -> list[Lane]:
        """Return lanes that share the checks `names`."""
        queue = SimpleQueue[str]()
        for name in names:
            queue.put(name)
        return [Lane(lane, each, queue) for lane, each in list(ranks.items())[: len(names)]]

    def _folder(self) -> Path:
        with self._lock:
            return self._make_folder()

    def _run(self) -> None:
        for number, phase in enumerate(self.phases):
            lanes = [threading.Thread(target=self._run_lane, args=[lane], daemon=True) for lane in phase]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
            needed = [lane.ranks for later in self.phases[number + 1 :] for lane in later]
            for lane in phase:
                if lane.ranks not in needed:
                    lane.ranks.close()
        for result in self._results.values():
            if not result.done():
                result.set_result(Result(None))

    def _run_lane(self, lane: Lane) -> None:
        with suppress(Empty):
            while not self._stopped:
                name, began = lane.queue.get_nowait(), time.monotonic()
                outcome = lane.ranks.run(name, self.checks[name])
                self._results[name].set_result(Result(outcome, time.monotonic() - began, lane.name))
                self._note_left()

    def _note_left(self) -> None:
        if self._left is not None:
            with self._lock:
                self._left.write_text("".join(f"{name}\n" for name in self.left()))

    def result(self, name: str) -> Result:
        """Wait until a check has run, or the time for all is over."""
        return self._results[name].result()

    def left(self) -> list[str]:
        """Return the checks that failed or have not run."""
        return [name for name, found in self._results.items() if not found.done() or found.result().outcome != "ok"]

    def report(self, slowest: int = 10) -> list[str]:
        """Return the lines of a report: how long the checks took, and which did not run."""
        done = {name: found.result() for name, found in self._results.items() if found.done()}
        ran = {name: result for name, result in done.items() if result.outcome is not None}
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
        for phase in self.phases:
            for lane in phase:
                lane.ranks.close()
        self._thread.join(10.0)


def _divided(names: Sequence[str], pairs: int) -> tuple[list[str], list[str]]:
    """Return the checks that run on pairs, since two ranks are enough, and those that run on all ranks."""
    on_pairs = [name for name in names if pairs and not why_all(name)]
    return on_pairs, [name for name in names if name not in on_pairs]
