"""How a process ends. Imports only the standard library."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAVED = 75
"""exit code of a run that was asked to end and has saved: EX_TEMPFAIL of sysexits.h"""
UNSAVED = 4
"""exit code of a run that was asked to end and may not save: repeating its command would train the same steps again"""
DISAGREEMENT = 3
"""exit code of a comparison that has ended, but whose results disagree or are not finite; a traceback has 1"""
HOLD_BACK_S = 3.0
"""time in which a launcher ends the other ranks before they report consequential errors"""
ENDS_SOON = "SIGINT: the run saves and ends within log.every steps; a second one ends it at once"
ENDED_AT_ONCE = "interrupted: what was trained after the newest checkpoint is lost"
_END_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_BLOCKED = (*_END_SIGNALS, signal.SIGHUP)  # the launcher of `--nproc` handles SIGHUP
_POLL_S = 0.1
_GRACE_S = 5.0  # for the other ranks to start, after this one was asked to end
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process, even if stopped, when the thread that started it ends, or now if it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def block_signals() -> None:
    """Keep SIGTERM, SIGUSR1 and SIGHUP pending, here and in child processes; call it in the main thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)


def unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)


def end_on_signals() -> None:
    """Let SIGTERM and SIGUSR1 end this process, also pending ones.

    Linux sends a container's first process no signal that has no handler, so `docker stop` would wait, and kill it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)

    for number in _END_SIGNALS:
        signal.signal(number, end if os.getpid() == 1 else signal.SIG_DFL)
    unblock_signals()


@contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """Raise a SystemExit on SIGTERM, so that outer blocks remove their files; a second one ends this process at once.

    Use it in the main thread.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        say("dlrm-overlap: interrupted by SIGTERM")
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupt_imports() -> None:
    """Let SIGINT, unless ignored, end this process at once during imports: libraries may catch KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                say("dlrm-overlap: interrupted")
                os._exit(128 + number)
            frame = frame.f_back
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def say(text: str) -> None:
    """Write to standard error, ignoring failures. Unlike `print` it is safe in a signal handler."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def report_missing(error: ModuleNotFoundError) -> bool:
    """Report a missing module and return True, or return False if the module is of this package."""
    if not error.name or error.name.partition(".")[0] == "dlrm_overlap":
        return False
    print(
        f"dlrm-overlap: {error.name}: no such module for {sys.executable}; activate the environment that dlrm-overlap "
        f"was installed into, or install it there again",
        file=sys.stderr,
        flush=True,
    )
    return True


class EndRequest:
    """Whether SIGTERM, SIGUSR1 or SIGINT has asked this process to end; a second SIGINT ends it at once.

    Further SIGTERM and SIGUSR1 change nothing, since Slurm and torchrun may both send one while the run saves.
    """

    def __init__(self) -> None:
        self.asked = self._listens = False

    def listen(self, answers: bool = True) -> None:
        """Handle the signals from now on, also pending ones; call it in the main thread.

        An ignored SIGINT stays ignored. If `answers`, a line is printed upon SIGINT: pass True in one process of a run.
        """
        is_second = False

        def handle(number: int, frame: FrameType | None) -> None:
            nonlocal is_second
            self.asked = True
            if number != signal.SIGINT:
                return
            if answers:
                say(f"dlrm-overlap: {ENDED_AT_ONCE if is_second else ENDS_SOON}")
            if is_second:
                os._exit(128 + number)
            is_second = True

        handles_sigint = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        for number in (*_END_SIGNALS, *[signal.SIGINT] * handles_sigint):
            signal.signal(number, handle)
        self._listens = True
        unblock_signals()

    @contextmanager
    def while_ranks_meet(self) -> Iterator[None]:
        """End this process with exit code `SAVED` if it is asked to end and the block takes 5 s more.

        Call `listen` before. The ranks may never meet, for example if torchrun has ended some before they started.
        """
        if not self._listens:
            yield
            return
        # The main thread waits in a call that runs no signal handlers, so the signals are kept pending, and another
        # thread looks for them. It does not call `sigtimedwait`, which reports a signal that never came if another one
        # interrupts it at the end of its timeout (CPython 3.11).
        signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
        met = threading.Event()

        def end_unless_met() -> None:
            while not (self.asked or signal.sigpending().intersection(_END_SIGNALS)):
                if met.wait(_POLL_S):
                    return
            if not met.wait(_GRACE_S):
                say("dlrm-overlap: asked to end before all ranks had started: run the same command again")
                os._exit(SAVED)

        threading.Thread(target=end_unless_met, name="end unless ranks meet", daemon=True).start()
        try:
            yield
        finally:
            met.set()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)
