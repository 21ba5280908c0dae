"""Processes that start with torch and TorchRec imported, which takes 8 seconds of a core.

multiprocessing's fork server imports them once for all tests. Command lines, their ranks, and the ranks of `run_ranks`
are forked from it, and continue as `python -m dlrm_overlap` does. Not with CUDA, which does not support fork.
"""

import gc
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

START_METHOD = "forkserver"
_CONTEXT = multiprocessing.get_context(START_METHOD)
_CONTEXT.set_forkserver_preload(
    ["tests.distributed.workers", "tests.warm", "dlrm_overlap.cli", "dlrm_overlap.observe.run_log"]
)


def _run() -> None:
    from dlrm_overlap.__main__ import run

    run()


class Command:
    """A running `dlrm-overlap ARGV`, with the methods of a `subprocess.Popen` that tests use."""

    def __init__(
        self,
        argv: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        streams: Sequence[Path],
        mark: Path | None = None,
        rank_main: Callable[[], None] = _run,
    ) -> None:
        """Start it.

        Args:
            argv: of the command line.
            folder: the working folder.
            environ: all environment variables.
            streams: files for standard output and standard error.
            mark: a file, not empty, that the command's processes map into their memory, so that `/proc` identifies
                them; as their environment, it shows the fork server's.
            rank_main: runs the command line on a rank, instead of `python -m dlrm_overlap`.
        """
        self._process = _CONTEXT.Process(target=_begin, args=(argv, folder, environ, streams, mark, rank_main))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("dlrm-overlap", timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_maps: list[mmap.mmap] = []


def _begin(
    argv: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    streams: Sequence[Path],
    mark: Path | None,
    rank_main: Callable[[], None],
) -> None:
    from dlrm_overlap.launching import spawn

    for descriptor, path in enumerate((Path(os.devnull), *streams)):
        with path.open("w" if descriptor else "r") as file:
            os.dup2(file.fileno(), descriptor)
    if mark is not None:
        with mark.open("rb") as file:
            _maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    os.chdir(folder)

    def fork(*args: object, **options: object) -> _Rank:
        return _Rank(rank_main, *args, **options)  # type: ignore[arg-type]

    spawn.subprocess = SimpleNamespace(Popen=fork, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
    _go_on(argv, environ, _run)


def _go_on(argv: Sequence[str], environ: Mapping[str, str], main: Callable[[], None]) -> None:
    """Run `main` with the arguments, environment and signal handlers of a new process."""
    gc.freeze()  # what it was forked with, which each collection would visit
    os.environ.clear()
    os.environ.update(environ)
    if "TRITON_INTERPRET" not in environ:  # the fork server had it
        for name, module in sys.modules.items():
            if name.startswith("dlrm_overlap.kernels") and hasattr(module, "INTERPRETED"):
                module.INTERPRETED = False  # type: ignore[attr-defined]
    # After a fork, PyTorch replaces its thread pool at its first use, and two first uses at once abort the process with
    # "Invalid thread pool!". So the first use is here, before other threads begin.
    torch.set_num_threads(torch.get_num_threads())
    sys.argv = ["dlrm-overlap", *argv]
    for number in (number for number in signal.valid_signals() if callable(signal.getsignal(number))):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


class _Rank:
    """A rank forked from its launcher, with the methods of a `subprocess.Popen` that `launching.spawn` uses."""

    def __init__(
        self,
        main: Callable[[], None],
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        start_new_session: bool,
    ) -> None:
        assert (list(command[1:3]), stdin, start_new_session) == (["-m", "dlrm_overlap"], subprocess.DEVNULL, True)
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            _go_on(command[3:], env, main)
        finally:
            os._exit(1)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
