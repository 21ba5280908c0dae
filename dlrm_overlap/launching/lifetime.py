"""The end of a process: with its parent, or, where it is asked to end, after a save.

Imports nothing but Python's own modules.
"""

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
"""exit code of a run that was asked to end, and can go on from what it has saved: EX_TEMPFAIL of sysexits.h"""
HOLD_BACK_S = 3.0
"""by then a launcher has ended the other ranks of one that has failed, which would report what follows from it"""
ENDS_SOON = "SIGINT: the run saves and ends after its next log line; a second one ends it at once"
ENDED_AT_ONCE = "interrupted: what was trained after the newest checkpoint is lost"
_ASKS = (signal.SIGTERM, signal.SIGUSR1)
_HELD = (*_ASKS, signal.SIGHUP)  # which asks the launcher of `--nproc`
_POLL_S = 0.1
_GRACE_S = 5.0  # for the other ranks to meet this one, after it was asked to end
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as the thread that has started it is gone, however that ended.

    A thread that watches a pipe would not do: a process that is stopped, or in a call that never returns, would live
    on. Where the process `parent` is gone already, this one ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def block_signals() -> None:
    """Keep SIGTERM, SIGUSR1 and SIGHUP pending, in this process and in those that it starts from now on.

    So a signal that arrives before a process can save is not lost, and does not end it. Call it in the main thread.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def unblock_signals() -> None:
    """Deliver the signals that `block_signals`, here or in the process that started this one, has kept pending."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def end_on_signals() -> None:
    """Let SIGTERM and SIGUSR1 end this process from now on, also if they are pending: it has nothing left to save."""
    for number in _ASKS:
        signal.signal(number, signal.SIG_DFL)
    unblock_signals()


def interrupt_imports() -> None:
    """Let SIGINT end this process at once while a module is imported; otherwise it raises KeyboardInterrupt as before.

    Libraries catch what is raised while they are imported, and go on or abort. If SIGINT is ignored, it stays ignored.
    """

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
    """Write lines to standard error, whose reader may be gone. Unlike `print` it is safe in a signal handler."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def report_missing(error: ModuleNotFoundError) -> bool:
    """Name a module that was not found, and its cure, in one line on standard error.

    Returns:
        Whether it was reported: not for a module of this package.
    """
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
    """Whether this process was asked to end: SIGTERM, SIGUSR1 and SIGINT only ask. A second SIGINT ends it at once."""

    def __init__(self) -> None:
        self.asked = self._listens = False

    def listen(self, answers: bool = True) -> None:
        """Take the signals from now on, also pending ones. Call it from the main thread.

        A SIGINT that is ignored, as in a background job of a script, stays so. One process `answers` it by a line.
        """
        is_second = False

        def hear(number: int, frame: FrameType | None) -> None:
            nonlocal is_second
            self.asked = True
            if number != signal.SIGINT:
                return
            if answers:
                say(f"dlrm-overlap: {ENDED_AT_ONCE if is_second else ENDS_SOON}")
            if is_second:
                os._exit(128 + number)
            is_second = True

        heeds_keys = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        for number in (*_ASKS, *[signal.SIGINT] * heeds_keys):
            signal.signal(number, hear)
        self._listens = True
        unblock_signals()

    @contextmanager
    def while_ranks_meet(self) -> Iterator[None]:
        """In the block, end this process with `SAVED` if it is asked to end and the block takes 5 s longer.

        Other ranks may never come, as when torchrun ends the remaining ranks after one has failed, and nothing was
        trained yet. Does nothing unless this process listens.
        """
        if not self._listens:
            yield
            return
        # The main thread waits in a call that runs no signal handlers. So the signals are blocked, and another thread
        # takes them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ASKS)
        met = threading.Event()

        def end_unless_met() -> None:
            while not met.is_set():
                if self.asked or signal.sigtimedwait(_ASKS, _POLL_S):
                    self.asked = True
                    if not met.wait(_GRACE_S):
                        say("dlrm-overlap: asked to end before all ranks had started: run the same command again")
                        os._exit(SAVED)

        threading.Thread(target=end_unless_met, name="end unless ranks meet", daemon=True).start()
        try:
            yield
        finally:
            met.set()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKS)
