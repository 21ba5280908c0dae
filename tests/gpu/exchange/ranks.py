"""Sets of processes that run checks one after the other, watched by a parent that no hang and no crash stops."""

import contextlib
import faulthandler
import gc
import json
import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.launching.launcher import LOOPBACK, World, free_port
from dlrm_overlap.launching.process_group import find_device, init_process_group
from tests.gpu.exchange.place import Check, Place
from tests.gpu.exchange.sharing import init_shared
from tests.warm import START_METHOD

_START, _START_TIMEOUT_S = "start", 120.0
_GRACE_S = 10.0  # that the other ranks have once one has failed or ended
_COLLECTIVE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """How a check went on all ranks."""

    text: str
    """ok, or what went wrong on the rank that failed first"""
    seconds: float


def run_checks(place: Place, checks: Iterable[tuple[str, Check]]) -> None:
    """Run `checks` on this rank, reporting each; end the process where its GPU has become unusable."""
    for name, check in checks:
        place.begin(name)
        error: BaseException | None = None
        try:
            check.run(place)
        except Exception as raised:
            error = place.why(raised)
        try:
            gc.collect()  # sharded modules refer to themselves
            place.synchronize()
            if place.on_gpu:
                torch.rand(1, device=place.device)  # fails from a broken capture on
                torch.cuda.empty_cache()
        except RuntimeError as raised:
            place.report(error or place.why(raised))
            os._exit(1)
        place.report(error)
        del error  # its traceback holds the frames of the check, and so its windows
        place.meet()


def _asked_for(asks: Connection) -> Iterator[tuple[str, Check]]:
    """Yield the checks that the parent asks for, until it asks for no more."""
    yield _START, Check(Place.meet)
    with contextlib.suppress(EOFError):
        while True:
            yield asks.recv()


def _run_rank(rank: int, world_size: int, ranks_per_gpu: int, port: int, folder: Path, asks: Connection) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)  # the parent asks where a rank hangs
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec|torch|dlrm_overlap")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    # TorchRec places a rank's shards on the GPU whose number is the rank modulo the local world size. So ranks that
    # share GPUs take them in turns, in a world of as many ranks a host as there are GPUs.
    gpus = world_size // ranks_per_gpu
    world = World(rank, rank % gpus, world_size, gpus, LOOPBACK, port, "nproc")
    os.environ["LOCAL_WORLD_SIZE"] = str(gpus)
    device = find_device("auto", world.local_rank)
    (init_process_group if ranks_per_gpu == 1 else init_shared)(world, device, _COLLECTIVE_TIMEOUT_S)
    group = dist.group.WORLD
    assert group is not None
    place = Place(world, group, device, folder)
    run_checks(place, _asked_for(asks))
    os._exit(0)  # the interpreter's own end may abort, see cli.run


class RankSet:
    """Processes of one world that run the checks they are asked for, in that order."""

    def __init__(self, world_size: int, folder: Path, ranks_per_gpu: int = 1) -> None:
        """Start them; `folder`, which is new, takes their reports and logs."""
        self.outcomes: dict[str, Outcome] = {}
        """of the start and of the checks that have ended; those after one that broke the set were not run"""
        self.closed = False
        self._checks, self._folder = {_START: Check(Place.meet, _START_TIMEOUT_S)}, folder
        folder.mkdir(parents=True, exist_ok=True)
        method: Any = "spawn" if torch.cuda.is_available() else START_METHOD
        context: Any = multiprocessing.get_context(method)
        port = free_port()
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        self._asks = [ask for _, ask in pipes]
        self._processes = [
            context.Process(target=_run_rank, args=(rank, world_size, ranks_per_gpu, port, folder, asks), daemon=True)
            for rank, (asks, _) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for asks, _ in pipes:
            asks.close()  # so that `ask` fails once the rank has ended
        self._began = time.monotonic()
        self._failed_at: float | None = None

    def ask(self, name: str, check: Check) -> None:
        """Let the ranks run `check` after those that they were asked for before."""
        if len(self.outcomes) == len(self._checks):
            self._began = time.monotonic()
        self._checks[name] = check
        for rank in self._asks:
            with contextlib.suppress(BrokenPipeError):  # it has ended, which `poll` finds
                rank.send((name, check))

    def poll(self) -> bool:
        """Take up the reports that have come; return whether more are to come of what was asked for."""
        while len(self.outcomes) < len(self._checks):
            name = list(self._checks)[len(self.outcomes)]
            ended = [rank for rank, process in enumerate(self._processes) if not process.is_alive()]
            reports = self._reports(name)  # after the look at who lives: a rank reports, then ends
            if len(reports) < len(self._processes):
                return self._wait_on(name, reports, ended)
            self.outcomes[name] = self._outcome(reports, "")
            self._began, self._failed_at = time.monotonic(), None
        return False

    def _wait_on(self, name: str, reports: Mapping[int, dict], ended: Sequence[int]) -> bool:
        """Return whether the ranks that have not reported may still do so, else end the set."""
        now, timeout_s = time.monotonic(), self._checks[name].timeout_s
        missing = [rank for rank in range(len(self._processes)) if rank not in reports]
        lost = set(missing) & set(ended)
        if self._failed_at is None and (lost or any(report["error"] for report in reports.values())):
            self._failed_at = now
        if self._failed_at is not None:
            if now < self._failed_at + _GRACE_S and len(lost) < len(missing):
                return True
            what = f"ranks {missing} did not report"
        elif now > self._began + timeout_s:
            what = f"hangs: ranks {missing} did not report within {timeout_s:g} s"
        else:
            return True
        self._ask_where([rank for rank in missing if rank not in lost])
        logs = [f"rank {rank}, exit code {self._processes[rank].exitcode}:\n{self._log(rank)}" for rank in missing]
        outcome = self._outcome(reports, "\n".join([what, *logs]))
        self.outcomes |= dict.fromkeys(self._checks, outcome) if name == _START else {name: outcome}
        self.close()
        return False

    def _ask_where(self, ranks: Sequence[int]) -> None:
        """Let ranks write the stacks of their threads to their logs."""
        for rank in ranks:
            process = self._processes[rank]
            if process.pid is not None and (self._folder / f"rank{rank}.log").exists():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5 * bool(ranks))

    def _reports(self, name: str) -> dict[int, dict]:
        """Return what each rank has reported of check `name`, the earliest report first."""
        paths = {rank: self._folder / f"{name}_{rank}.json" for rank in range(len(self._processes))}
        there = {rank: path for rank, path in paths.items() if path.exists()}
        return {rank: json.loads(there[rank].read_text()) for rank in sorted(there, key=lambda r: _written(there[r]))}

    def _outcome(self, reports: Mapping[int, dict], missing: str) -> Outcome:
        failed = [rank for rank, report in reports.items() if report["error"]]
        seconds = max((report["seconds"] for report in reports.values()), default=0.0)
        if failed:
            error = reports[failed[0]]["error"].strip()
            told = f"ranks {sorted(failed)} failed, rank {failed[0]} first: {error.splitlines()[-1]:.300}"
            missing = f"{told}\n{error}\n{missing}"
        return Outcome(missing.strip() or "ok", seconds)

    def _log(self, rank: int) -> str:
        path = self._folder / f"rank{rank}.log"
        if not path.exists():
            return "ended before it began"
        text = path.read_text(errors="replace")
        aborted = text.rfind("terminate called")  # a long list of frames follows
        return text[aborted:][:2000] if aborted >= 0 else text[-2000:]

    def close(self) -> None:
        """End the processes."""
        self.closed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


class Ranks:
    """The ranks of a test session: one set that lasts, and a new one for each check that runs alone.

    Sets for the latter are started ahead, while the check before runs: to start one takes longer than most checks.
    """

    def __init__(
        self, world_size: int, ranks_per_gpu: int, make_folder: Callable[[], Path], budget_s: float, alone: int
    ) -> None:
        """Start nothing yet.

        Args:
            world_size: ranks of a set.
            ranks_per_gpu: ranks that share a GPU; each check may take as many times as long.
            make_folder: makes a new folder for a set's logs and reports.
            budget_s: seconds for all checks.
            alone: how many checks that run alone may be asked for.
        """
        self.ranks_per_gpu = ranks_per_gpu
        self._world_size, self._make_folder = world_size, make_folder
        self._deadline = time.monotonic() + budget_s
        self._lasting: RankSet | None = None
        self._ahead: list[RankSet] = []
        self._to_start = alone
        self._at_once = 3 if torch.cuda.is_available() else 1

    def run(self, name: str, check: Check) -> Outcome | None:
        """Run `check` on all ranks and return its outcome; None where the time for all checks is over before."""
        if time.monotonic() > self._deadline:
            return None
        ranks = self._of_its_own() if check.alone else self._of_all()
        ranks.ask(name, replace(check, timeout_s=self.ranks_per_gpu * check.timeout_s))
        while ranks.poll():
            time.sleep(0.01)
            if time.monotonic() > self._deadline:
                ranks.close()
                return None
        if check.alone:
            ranks.close()
        return ranks.outcomes[name]

    def _of_all(self) -> RankSet:
        if self._lasting is None or self._lasting.closed:
            self._lasting = self._start()
        return self._lasting

    def _of_its_own(self) -> RankSet:
        if self._lasting is not None:
            self._lasting.close()  # gives back its GPUs' memory
        while len(self._ahead) < self._at_once and (self._to_start or not self._ahead):
            self._ahead.append(self._start())
            self._to_start -= 1
        return self._ahead.pop(0)

    def _start(self) -> RankSet:
        return RankSet(self._world_size, self._make_folder(), self.ranks_per_gpu)

    def close(self) -> None:
        """End all processes."""
        for ranks in (*self._ahead, *([self._lasting] if self._lasting else [])):
            ranks.close()


def default_world(ranks_per_gpu: int = 1) -> int:
    """Return how many ranks to start where none are asked for: those of at most four GPUs, or two on a CPU.

    Where ranks share a GPU, there are four at most, or as many as share one.
    """
    gpus = torch.cuda.device_count()
    return min(max(1, 4 // ranks_per_gpu), gpus) * ranks_per_gpu or 2
