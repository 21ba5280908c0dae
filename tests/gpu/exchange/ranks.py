"""Sets of processes that run checks one after another, and a parent that survives their hangs and crashes."""

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.launching.launcher import LOOPBACK, World, free_port
from dlrm_overlap.launching.process_group import find_device, init_process_group
from tests.gpu.exchange.place import Check, Place, Report
from tests.gpu.exchange.sharing import init_shared
from tests.warm import START_METHOD

_START_TIMEOUT_S = 120.0
_GRACE_S = 5.0  # for the other ranks after one has failed or ended
_COLLECTIVE_TIMEOUT_S = 120.0
_STARTING = threading.Lock()  # a process inherits the environment, which is changed while it starts


def _run_checks(place: Place) -> None:
    """Run the checks that the parent asks for, and report each; end the process if its GPU has become unusable."""
    place.report(None)  # it has started
    while True:
        place.name, check, timeout_s = place.parent.recv()
        # A process in which CUDA hangs may not answer the parent's signal for the stacks of its threads.
        faulthandler.dump_traceback_later(0.95 * timeout_s, file=2)
        place.recorded.clear()
        error: BaseException | None = None
        try:
            check.run(place)
        except Exception as raised:
            error = place.why(raised)
            place.report_failing(error)
        try:
            gc.collect()  # sharded modules refer to themselves
            place.synchronize()
            if place.on_gpu:
                torch.rand(1, device=place.device)  # fails after a broken capture
                torch.cuda.empty_cache()
        except RuntimeError as raised:
            place.report(error or place.why(raised))
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
        place.report(error)
        del error  # its traceback keeps the frames of the check, and its windows, alive
        place.meet()


def _run_rank(rank: int, world_size: int, ranks_per_gpu: int, port: int, folder: Path, parent: Connection) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)  # by which the parent asks where a rank hangs
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec|torch|dlrm_overlap")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    # Otherwise each rank's Inductor starts 32 processes, and the ranks build tests of the CPU one after another.
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    # TorchRec places a rank's shards on GPU rank % local world size. So ranks that share GPUs are distributed round
    # robin, and the local world size is the number of GPUs.
    gpus = world_size // ranks_per_gpu
    world = World(rank, rank % gpus, world_size, gpus, LOOPBACK, port, "nproc")
    os.environ["LOCAL_WORLD_SIZE"] = str(gpus)
    device = find_device("auto", world.local_rank)
    (init_process_group if ranks_per_gpu == 1 else init_shared)(world, device, _COLLECTIVE_TIMEOUT_S)
    group = dist.group.WORLD
    assert group is not None
    with contextlib.suppress(EOFError):  # the parent asks for no more
        _run_checks(Place(world, group, device, folder, parent))
    os._exit(0)  # the interpreter's own end may abort, see cli.run


class RankSet:
    """Processes of one world that run checks."""

    def __init__(self, world_size: int, folder: Path, ranks_per_gpu: int = 1, gpus: Sequence[int] = ()) -> None:
        """Start them.

        Args:
            world_size: number of ranks.
            folder: new folder for their logs.
            ranks_per_gpu: ranks that share a GPU.
            gpus: numbers of the GPUs that they see; all if empty.
        """
        self.closed, self._started, self._folder = False, False, folder
        folder.mkdir(parents=True, exist_ok=True)
        method: Any = "spawn" if torch.cuda.is_available() else START_METHOD
        context: Any = multiprocessing.get_context(method)
        pipes, port = [context.Pipe() for _ in range(world_size)], free_port()
        self._ranks: list[Connection] = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_run_rank, args=(rank, world_size, ranks_per_gpu, port, folder, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        with _visible(gpus):
            for process in self._processes:
                process.start()
        for _, theirs in pipes:
            theirs.close()  # so that the end of a rank closes its pipe

    def run(self, name: str, check: Check, timeout_s: float) -> str:
        """Run `check` on all ranks; return "ok", or the error of the rank that failed first.

        The set is closed unless every rank has reported.
        """
        if not self._started and (text := self._await_reports(_START_TIMEOUT_S)) != "ok":
            return text
        self._started = True
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # it has ended, as is reported below
                rank.send((name, check, timeout_s))
        return self._await_reports(timeout_s)

    def _await_reports(self, timeout_s: float) -> str:
        end, hangs = time.monotonic() + timeout_s, True
        reports: dict[int, str | None] = {}
        waiting, lost = {each: rank for rank, each in enumerate(self._ranks)}, list[int]()
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    report: Report | None = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    report = None
                    lost.append(rank)
                if report is None or report.is_last:
                    del waiting[pipe]  # type: ignore[arg-type]
                if report is not None:
                    reports[rank] = report.error or reports.get(rank)
                if hangs and (lost or reports.get(rank)):
                    end, hangs = time.monotonic() + _GRACE_S, False
        missing, messages = sorted([*lost, *waiting.values()]), list[str]()
        if failed := [rank for rank, error in reports.items() if error]:
            error = str(reports[failed[0]]).strip()
            last = f"{error.splitlines()[-1]:.300}"
            messages.append(f"ranks {sorted(failed)} failed, rank {failed[0]} first: {last}\n{error}")
        if missing:
            within = f" within {timeout_s:g} s" if hangs else ""
            messages.append("hangs: " * hangs + f"ranks {missing} did not report{within}")
            messages += self._ends_of_logs(missing, [rank for rank in missing if rank not in lost])
            self.close()
        return "\n".join(messages) or "ok"

    def _ends_of_logs(self, ranks: list[int], alive: list[int]) -> list[str]:
        """Return the exit codes of ranks and the ends of their logs; ranks that are alive log their threads' stacks."""
        for rank, process in enumerate(self._processes):
            if rank not in alive:
                process.join(1.0)
            elif (self._folder / f"rank{rank}.log").exists():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5 * bool(alive))
        return [f"rank {rank}, exit code {self._processes[rank].exitcode}:\n{self._log(rank)}" for rank in ranks]

    def _log(self, rank: int) -> str:
        path = self._folder / f"rank{rank}.log"
        if not path.exists():
            return "ended before it began"
        text = path.read_text(errors="replace")
        if (aborted := text.rfind("terminate called")) >= 0:  # a long list of frames follows
            return text[aborted:][:2000]
        written, _, stacks = text.partition("Thread 0x") if "most recent call first" in text else (text, "", "")
        main = stacks.rpartition("most recent call first")[2]  # the main thread is the last, its innermost call first
        return written[-2000:] + main[:2000]

    def close(self) -> None:
        """End the processes."""
        self.closed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@contextmanager
def _visible(gpus: Sequence[int]) -> Iterator[None]:
    """Let processes that are started in the block see only these GPUs; all if none are given."""
    name = "CUDA_VISIBLE_DEVICES"
    with _STARTING:
        before = os.environ.get(name)
        all_of_them = before.split(",") if before else [str(gpu) for gpu in range(torch.cuda.device_count())]
        try:
            if gpus and all_of_them:
                os.environ[name] = ",".join(all_of_them[gpu] for gpu in gpus)
            yield
        finally:
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before


class Ranks:
    """The ranks of a test session on some GPUs: a lasting set, and a new one for each check that runs alone.

    The latter are started ahead, during the check before: to start a set takes longer than most checks.
    """

    def __init__(
        self,
        world_size: int,
        ranks_per_gpu: int,
        make_folder: Callable[[], Path],
        deadline: float,
        alone: int,
        gpus: Sequence[int] = (),
    ) -> None:
        """Start nothing yet.

        Args:
            world_size: ranks of a set.
            ranks_per_gpu: ranks that share a GPU, which multiplies the timeout of each check.
            make_folder: makes a new folder for a set's logs.
            deadline: end of all checks, by `time.monotonic`.
            alone: number of checks that run alone.
            gpus: numbers of the GPUs that the ranks see; all if empty.
        """
        self.ranks_per_gpu = ranks_per_gpu
        self._world_size, self._make_folder, self._gpus = world_size, make_folder, gpus
        self._deadline = deadline
        self._lasting: RankSet | None = None
        self._ahead: list[RankSet] = []
        self._to_start = alone
        self._at_once = 3 if torch.cuda.is_available() else 1

    def run(self, name: str, check: Check) -> str | None:
        """Run `check` on all ranks; return "ok" or the error, None if the time for all checks is over."""
        left_s = self._deadline - time.monotonic()
        if left_s < 0:
            return None
        ranks = self._new_set() if check.alone else self.lasting()
        text = ranks.run(name, check, min(left_s, self.ranks_per_gpu * check.timeout_s))
        if check.alone and not ranks.closed:
            ranks.close()
        return None if text != "ok" and time.monotonic() > self._deadline else text

    def lasting(self) -> RankSet:
        """Return the lasting set; start it if there is none."""
        if self._lasting is None or self._lasting.closed:
            self._lasting = self._start()
        return self._lasting

    def _new_set(self) -> RankSet:
        if self._lasting is not None:
            self._lasting.close()  # frees its memory on the GPUs
        while len(self._ahead) < self._at_once and (self._to_start or not self._ahead):
            self._ahead.append(self._start())
            self._to_start -= 1
        return self._ahead.pop(0)

    def _start(self) -> RankSet:
        return RankSet(self._world_size, self._make_folder(), self.ranks_per_gpu, self._gpus)

    def close(self) -> None:
        """End all processes."""
        for ranks in (*self._ahead, *([self._lasting] if self._lasting else [])):
            ranks.close()


def default_world(ranks_per_gpu: int = 1) -> int:
    """Return the default number of ranks: one for each of at most four GPUs, or two on a CPU.

    Where ranks share a GPU there are at most four, or as many as share one.
    """
    gpus = torch.cuda.device_count()
    return min(max(1, 4 // ranks_per_gpu), gpus) * ranks_per_gpu or 2
