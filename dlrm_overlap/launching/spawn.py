"""The launcher of `--nproc`."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.launcher import LAUNCHER_PID, LOOPBACK, NPROC_MARKER, free_port
from dlrm_overlap.launching.lifetime import ENDED_AT_ONCE, SAVED, UNSAVED, block_signals, say, unblock_signals

# Forwarded to the ranks, which may save before they end.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
_POLL_S = 0.05
_LEFT_S = 300.0  # ranks save together, so others end soon after the first, unless they are stopped or never met
_USER_ERROR = 2
_REASONS = {
    signal.SIGKILL: "most often by the kernel's out-of-memory killer, see `dmesg`",
    signal.SIGBUS: "most often since /dev/shm or a disk is full, or a mapped file was truncated",
}


def spawn(argv: Sequence[str], nproc: int) -> int:
    """Run `python -m dlrm_overlap ARGV` as `nproc` ranks on this machine; return the first failing exit code, or 0.

    If a rank fails, the others are killed, and standard error names it. SIGUSR1 is forwarded to the ranks, and SIGTERM,
    SIGHUP and SIGINT as SIGTERM, so that ranks may save. A rank that still runs five minutes after another one has
    ended with `lifetime.SAVED` or `UNSAVED` is killed. A second signal, unless it is another SIGHUP, ends all ranks at
    once. The exit code after a signal is the ranks' if it is one of these two, else 128 + signal.

    Ranks lead process groups, so their loader processes end with them, and Linux kills ranks whose launcher is killed.
    Call it in the main thread. Raises `InputError` inside another launcher of several processes.
    """
    _refuse_nesting(os.environ)
    caught: list[int] = []

    def catch(number: int, _: FrameType | None) -> None:
        # A terminal that is closed may send SIGHUP twice, by its shell and by the kernel.
        if number != signal.SIGHUP or number not in caught:
            caught.append(number)

    previous = {number: signal.getsignal(number) for number in _FORWARDED}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:  # ignored under nohup and in background jobs of scripts
            signal.signal(number, catch)
    port = free_port()
    workers: list[subprocess.Popen[bytes]] = []
    try:
        unblock_signals()
        if caught:
            say(f"dlrm-overlap: {signal.Signals(caught[0]).name}: no rank has started; run the same command again")
            return SAVED if argv[0] == "train" else 128 + caught[0]
        block_signals()
        for rank in range(nproc):
            workers.append(_start(argv, rank, nproc, port))
        unblock_signals()
        return _wait(workers, caught)
    finally:
        unblock_signals()
        for worker in workers:
            _kill_group(worker)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(workers: Sequence[subprocess.Popen[bytes]], caught: Sequence[int]) -> int:
    is_forwarded, first_end_s = False, math.inf
    while True:
        codes = [worker.poll() for worker in workers]
        failed = [(code, rank) for rank, code in enumerate(codes) if code not in (None, 0, SAVED, UNSAVED)]
        if failed and caught:
            return 128 + caught[0]
        if failed:
            code, rank = min(failed)  # killed by a signal: below 0, and probably the cause of other failures
            _report(rank, workers[rank].pid, code)
            return code if code > 0 else 128 - code
        ended = next((code for code in (UNSAVED, SAVED) if code in codes), 0)
        if None not in codes:
            return ended
        if ended:
            first_end_s = min(first_end_s, time.monotonic())
            if time.monotonic() - first_end_s > _LEFT_S:
                left = codes.index(None)
                say(f"dlrm-overlap: rank {left} (pid {workers[left].pid}) has not ended with the others, and is killed")
                return ended
        if len(caught) > 1:
            if signal.SIGINT in caught:  # same message as without --nproc
                say(f"dlrm-overlap: {ENDED_AT_ONCE}")
            return 128 + caught[0]
        if caught and not is_forwarded:
            is_forwarded = True
            number = signal.SIGUSR1 if caught[0] == signal.SIGUSR1 else signal.SIGTERM
            name = signal.Signals(caught[0]).name
            say(f"dlrm-overlap: {name}: asking the ranks to end; a second one ends them at once")
            for worker in workers:
                worker.send_signal(number)  # not to its process group: the rank still needs its loader processes
        time.sleep(_POLL_S)


def _report(rank: int, pid: int, code: int) -> None:
    if code < 0:
        reason = _REASONS.get(signal.Signals(-code))
        how = f"was killed by {signal.Signals(-code).name}" + (f", {reason}" if reason else "")
    elif rank and code != _USER_ERROR:
        how = f"ended with exit code {code}"
    else:
        return
    say(f"dlrm-overlap: rank {rank} (pid {pid}) {how}")


def _refuse_nesting(environ: Mapping[str, str]) -> None:
    if "TORCHELASTIC_RUN_ID" in environ:
        raise InputError("--nproc inside torchrun: both would start the ranks; drop one of the two")
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        if (size := environ.get(name, "1")) != "1":
            raise InputError(
                f"--nproc inside another launcher ({name} is {size}): both would start the ranks; drop one of the two"
            )


def import_path() -> dict[str, str]:
    """Return environment variables with which ranks import this package, and nothing from the working folder."""
    root = str(Path(__file__).resolve().parents[2])
    if sys.flags.safe_path or os.path.realpath(sys.path[0]) != root:
        return {"PYTHONSAFEPATH": "1"}
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def _start(argv: Sequence[str], rank: int, nproc: int, port: int) -> subprocess.Popen[bytes]:
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_PORT": port}
    environ = os.environ | {name: str(value) for name, value in world.items()}
    environ |= {"MASTER_ADDR": LOOPBACK, NPROC_MARKER: str(nproc), LAUNCHER_PID: str(os.getpid())}
    environ |= import_path()
    environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    command = [sys.executable, "-m", "dlrm_overlap", *argv]
    try:
        return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise InputError(
            f"--nproc: rank {rank} of {nproc} cannot be started ({error.strerror}); start fewer, or raise the limits "
            f"of this user (`ulimit -a`)"
        ) from None


def _kill_group(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker and its child processes, even if they are stopped or ignore signals."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
