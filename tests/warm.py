"""Processes that have torch and TorchRec from their first moment, which take 8 seconds of a core to import.

multiprocessing's fork server imports them once for all tests. A command line and its ranks are forked from it, and go
on as those of `python -m dlrm_overlap` do; so are the ranks of `run_ranks`. Not where CUDA is: it bears no fork.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO

START_METHOD = "forkserver"
_MODULES = ["tests.distributed.workers", "tests.warm", "dlrm_overlap.cli", "dlrm_overlap.observe.tensorboard"]
_CONTEXT = multiprocessing.get_context(START_METHOD)
_CONTEXT.set_forkserver_preload(_MODULES)


def run_command(
    argv: Sequence[str], environ: Mapping[str, str], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `dlrm-overlap ARGV` in `folder`, with the variables of `environ` alone; return its exit code and output.

    Raises:
        TimeoutExpired: of subprocess; the command is killed, and its ranks with it.
    """
    with tempfile.TemporaryDirectory() as own:
        streams = [Path(own, name) for name in ("stdout", "stderr")]
        process = _CONTEXT.Process(target=_command, args=(argv, environ, folder, streams))
        process.start()
        process.join(timeout_s)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        output, errors = (path.read_text() if path.exists() else "" for path in streams)
    if code is None:
        raise subprocess.TimeoutExpired(["dlrm-overlap", *argv], timeout_s, output, errors)
    return subprocess.CompletedProcess(["dlrm-overlap", *argv], code, output, errors)


def _command(argv: Sequence[str], environ: Mapping[str, str], folder: Path, streams: Sequence[Path]) -> None:
    from dlrm_overlap.launching import spawn

    for descriptor, path in enumerate((Path(os.devnull), *streams)):
        with path.open("r" if descriptor == 0 else "w") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    spawn.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_Fork, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT
    )
    _become(argv, environ)


def _become(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Let this process be `python -m dlrm_overlap ARGV`."""
    from dlrm_overlap.__main__ import run

    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["dlrm-overlap", *argv]
    run()


class _Fork:
    """What `launching.spawn` needs of a `Popen`: a rank, forked from its launcher and not executed anew."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: IO[bytes] | None,
        stderr: int | None,
        start_new_session: bool,
    ) -> None:
        assert (list(command[1:3]), stdin, start_new_session) == (["-m", "dlrm_overlap"], subprocess.DEVNULL, True)
        assert stderr == (stdout and subprocess.STDOUT)
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            for descriptor in (1, 2) if stdout else ():
                os.dup2(stdout.fileno(), descriptor)
            for number in (n for n in signal.valid_signals() if callable(signal.getsignal(n))):
                signal.signal(number, signal.SIG_DFL)  # as execve does
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python does
            _become(command[3:], env)
        finally:
            os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
