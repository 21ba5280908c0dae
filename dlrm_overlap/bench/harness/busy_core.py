"""A CPU that is short of time: this process on one core, beside a process that is always busy."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Ends by itself once its parent is gone, however that ended: it belongs to another process then.
_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(100_000):\n        pass"


def core_of_rank(local_rank: int, local_world_size: int) -> int:
    """Return the core of the rank: of those that it may use, the ranks' cores are as far apart as can be."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[local_rank * len(cores) // local_world_size % len(cores)]


@contextlib.contextmanager
def sharing_core(core: int) -> Iterator[int]:
    """Hold all threads of this process to `core`, on which a busy process of equal priority runs meanwhile.

    Threads are held one by one: the system knows no affinity of a process, and autograd runs the backward on a thread
    of its own. Afterwards every thread may run where it could before, and threads made meanwhile where this one can.

    Yields:
        The busy process's id.
    """
    own = os.sched_getaffinity(0)
    before = {thread: _affinity(thread) for thread in _threads()}
    neighbour = None
    try:
        for thread in before:
            _hold(thread, {core})
        arguments = [sys.executable, "-I", "-S", "-c", _BUSY, str(os.getpid())]
        neighbour = subprocess.Popen(arguments, stdin=subprocess.DEVNULL)  # starts where this thread may run
        yield neighbour.pid
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()
        for thread in _threads():
            _hold(thread, before.get(thread) or own)


def _threads() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]


def _affinity(thread: int) -> set[int] | None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        return os.sched_getaffinity(thread)
    return None


def _hold(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(thread, cores)
