"""The launcher behind `--nproc`: starts the ranks on this host, and leaves none behind."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.launcher import LOOPBACK, NPROC_MARKER, free_port, mpi_task, slurm_task

log = logging.getLogger(__name__)

_GRACE_S = 10.0  # between SIGTERM and SIGKILL


def spawn(argv: Sequence[str], nproc: int) -> int:
    """Run `python -m dlrm_overlap ARGV` as `nproc` ranks on this host and return the first failing exit code, or 0.

    Rank 0's output passes through untouched, so a terminal stays a terminal; of the other ranks, only standard error
    does. When a rank fails, the others get SIGTERM, and SIGKILL 10 s later; so do all ranks on SIGINT, SIGTERM or
    SIGHUP, after which 128 + signal is returned, as a shell does. Each rank leads a process group of its own, so its
    loader processes end with it. When this function returns, none is alive. Call it from the main thread.

    Since one rank's failure ends the others at once, an error that all of them find is reported once, provided that
    ranks above 0 wait a moment before they report it.

    Raises:
        InputError: inside another launcher that started several processes.
    """
    _refuse_nesting(os.environ)
    caught: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:  # under nohup, or as a background job of a script, it stays ignored
            signal.signal(number, lambda number, frame: caught.append(number))
    port = free_port()
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(nproc):
            workers.append(_start(argv, rank, nproc, port))
        while not caught:
            codes = [worker.poll() for worker in workers]
            if failed := [code for code in codes if code]:
                return failed[0] if failed[0] > 0 else 128 - failed[0]
            if None not in codes:
                return 0
            time.sleep(0.05)
        return 128 + caught[0]
    finally:
        _end(workers)
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a progress bar that was cut off has left the cursor hidden
        for number, handler in previous.items():
            signal.signal(number, handler)


def _refuse_nesting(environ: Mapping[str, str]) -> None:
    mpi, step = mpi_task(environ), slurm_task(environ)
    for launcher, found in (
        ("dlrm-overlap --nproc", NPROC_MARKER in environ),
        ("torchrun", "TORCHELASTIC_RUN_ID" in environ),
        ("mpirun", mpi and mpi[1] > 1),
        ("srun", step and step[1] > 1),
        (f"WORLD_SIZE {environ.get('WORLD_SIZE')}", environ.get("WORLD_SIZE", "1") != "1"),
    ):
        if found:
            raise InputError(f"--nproc inside {launcher}: both would start the ranks; drop one of the two")


def _start(argv: Sequence[str], rank: int, nproc: int, port: int) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_PORT": port}
    environ = os.environ | {name: str(value) for name, value in place.items()}
    environ |= {"MASTER_ADDR": LOOPBACK, NPROC_MARKER: str(nproc)}
    environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    return subprocess.Popen(
        [sys.executable, "-m", "dlrm_overlap", *argv],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the workers and whatever they started; return at once where all have ended by themselves."""
    for worker in workers:
        _kill_group(worker, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("rank process %d did not end within %g s of SIGTERM: killed", worker.pid, _GRACE_S)
            _kill_group(worker, signal.SIGKILL)
            worker.wait()


def _kill_group(worker: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(worker.pid, number)
    except ProcessLookupError:
        return  # the leader and all it started are gone
