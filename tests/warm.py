"""Processes that start with torch, TorchRec and the tests imported, which takes 4 to 8 seconds of a core.

Command lines, their ranks, and the ranks of `run_ranks` are forked from multiprocessing's fork server, and continue as
`python -m dlrm_overlap` does. The server itself is forked from the process that has collected the tests; outside of
pytest it is a new process, which imports what most ranks need. Not with CUDA, which does not support fork.
"""

import contextlib
import faulthandler
import gc
import logging
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import NoReturn
from unittest.mock import patch

import torch

START_METHOD = "forkserver"
_CONTEXT = multiprocessing.get_context(START_METHOD)
_CONTEXT.set_forkserver_preload(
    ["tests.distributed.workers", "tests.warm", "dlrm_overlap.cli", "dlrm_overlap.observe.run_log", "torchmetrics"]
)


def fork_server() -> None:
    """Start the fork server as a fork of this process, before any use of it, and before threads; not with CUDA."""
    if torch.cuda.is_available():
        return
    resource_tracker.ensure_running()  # a new process
    with patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(_: str, command: Sequence[str], descriptors: Sequence[int]) -> int:
    """Take the part of `spawnv_passfds`: run the last of `python -c PROGRAM` in a fork of this process."""
    if pid := os.fork():
        return pid
    try:
        _serve(command[-1], descriptors)
    finally:
        os._exit(1)


def _serve(program: str, descriptors: Sequence[int]) -> NoReturn:
    """Run the fork server's `program`, with the streams and the state of a new process."""
    _, until = descriptors  # the reading end of a pipe, which tells when this process must end
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) != until and os.path.sameopenfile(int(name), until):
                os.close(int(name))
    faulthandler.disable()
    for handler in (reference() for reference in logging._handlerList):  # type: ignore[attr-defined]
        if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") is sys.stderr:
            handler.setStream(sys.__stderr__)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest has put others in their place
    forkserver._forkserver._lock = Lock()  # type: ignore[attr-defined]  # this one is held for ever
    torch.manual_seed(torch.initial_seed())  # modules of tests may have drawn numbers
    with contextlib.suppress(SystemExit):
        exec(program, {})
    os._exit(0)


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
        rank_main: Callable[[], object] = _run,
        main: Callable[[], object] = _run,
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
            main: the same, where it is started.
        """
        arguments = (argv, folder, environ, streams, mark, rank_main, main)
        self._process = _CONTEXT.Process(target=_begin, args=arguments)
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
    rank_main: Callable[[], object],
    main: Callable[[], object],
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
    _go_on(argv, environ, main)


def _go_on(argv: Sequence[str], environ: Mapping[str, str], main: Callable[[], object]) -> None:
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
    # The fork server read OMP_NUM_THREADS for itself; with more threads than free cores a step takes many times longer.
    torch.set_num_threads(int(environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    sys.argv = ["dlrm-overlap", *argv]
    for number in (number for number in signal.valid_signals() if callable(signal.getsignal(number))):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


class _Rank:
    """A rank forked from its launcher, with the methods of a `subprocess.Popen` that `launching.spawn` uses."""

    def __init__(
        self,
        main: Callable[[], object],
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
        leads, led = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(led)
            os.read(leads, 1)  # returns once the rank leads its process group, by which the launcher ends it
            os.close(leads)
            return
        try:
            os.setsid()
            os.close(leads)
            os.close(led)
            _go_on(command[3:], env, main)
        except SystemExit as ended:
            os._exit(ended.code if isinstance(ended.code, int) else 1)
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
