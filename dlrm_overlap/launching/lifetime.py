"""How long a process lives: it ends with its parent, and saves first where it is asked to end."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

LAUNCHER_PID = "DLRM_OVERLAP_LAUNCHER_PID"  # set by `spawn` in its workers
SAVED = 75
"""exit code of a run that was asked to end, and can go on from what it has saved: EX_TEMPFAIL of sysexits.h"""
ENDS_SOON = "SIGINT: the run saves and ends behind its next log line; a second one ends it at once"
ENDED_AT_ONCE = "interrupted: what was trained behind the newest checkpoint is lost"
_ASKS = (signal.SIGTERM, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GRACE_S = 5.0  # for other ranks to come to where they meet, once this one was asked to end
_SAME_S = 2.0  # in which a second SIGTERM is the first one, come by another way


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process as soon as the thread that has started it is gone, however that ended.

    A pipe whose end of file tells the child would need a thread in it that runs: one that is stopped, or is in a call
    that never returns, would live on. The kernel's SIGKILL ends these as well.

    Args:
        parent: process id of the parent. Where that is gone already, the kernel has nothing left to tell; then this
            process ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """End with the launcher behind `--nproc`, if that has started this process."""
    if LAUNCHER_PID in environ:
        end_with_parent(int(environ[LAUNCHER_PID]))


def hold_asks() -> None:
    """Let SIGTERM and SIGUSR1 wait, in this process and those that it starts from now on, until each has let them come.

    So none is lost between the start of a process and the moment from which it can save. Call it from the main thread.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKS)


def let_asks_come() -> None:
    """End what `hold_asks` has begun, here or in the process that has started this one."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKS)


def heed_asks() -> None:
    """Let SIGTERM and SIGUSR1 end this process from now on, those that have waited too: it has nothing left to save."""
    for number in _ASKS:
        signal.signal(number, signal.SIG_DFL)
    let_asks_come()


def tell(text: str) -> None:
    """Write lines to standard error, whose reader may be gone: a terminal that was closed, or a `tee` that has ended.

    It is safe in a signal handler, unlike `print`, which raises where it interrupts another `print`.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def open_streams() -> None:
    """Open /dev/null in place of each standard stream that is closed, as `2>&-` closes it.

    Else a file that is opened later would take its descriptor, and get what libraries write to standard error.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def interrupt_imports() -> None:
    """Let SIGINT end this process in one line while it imports a module; else it raises KeyboardInterrupt, as ever.

    Libraries catch what is raised while they are imported, and go on, or abort. Where SIGINT is ignored it stays so.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                tell("dlrm-overlap: interrupted")
                os._exit(128 + number)
            frame = frame.f_back
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


class EndRequest:
    """Whether this process was asked to end: SIGTERM, SIGUSR1 and SIGINT only ask. A second SIGTERM or SIGINT ends it.

    A SIGTERM within two seconds of the first is taken for the same, as where a batch system sends one to all processes
    and the launcher passes its own on. A SIGINT is a key that was pressed, so a second one is always another.
    """

    def __init__(self) -> None:
        self.asked = False

    def listen(self, answers: bool = True) -> None:
        """Take the signals from now on, and those that have waited. Call it from the main thread.

        A SIGINT that is ignored, as in a background job of a script, stays so.

        Args:
            answers: whether this process, of all ranks that a key may reach, answers it by a line.
        """
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(theirs, False)
        heeds_keys = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        for number in (*_ASKS, *[signal.SIGINT] * heeds_keys):
            signal.signal(number, lambda number, frame: None)
        # A handler runs in the main thread, which may be in a call that does not return; this thread hears of it still.
        signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(ours, answers), name="signals", daemon=True).start()
        let_asks_come()

    @contextmanager
    def while_ranks_meet(self) -> Iterator[None]:
        """In the block, end the process with `SAVED` some seconds after it was asked to: there is nothing to save yet.

        The other ranks may never come. Of a rank that fails as it starts, torchrun tells the others by SIGTERM alone.
        """
        met = threading.Event()

        def end_unless_met() -> None:
            while not met.wait(_GRACE_S / 50):
                if self.asked and not met.wait(_GRACE_S):
                    tell("dlrm-overlap: asked to end before all ranks had met; the same command begins anew")
                    os._exit(SAVED)

        threading.Thread(target=end_unless_met, name="end unless met", daemon=True).start()
        try:
            yield
        finally:
            met.set()

    def _hear(self, pipe: int, answers: bool) -> None:
        first: dict[int, float] = {}
        while True:
            number = os.read(pipe, 1)[0]
            if number not in (*_ASKS, signal.SIGINT):
                continue
            self.asked = True
            again = number in first
            first.setdefault(number, time.monotonic())
            if number == signal.SIGTERM and time.monotonic() - first[number] > _SAME_S:
                os._exit(128 + number)
            if number == signal.SIGINT:
                if answers:
                    tell(f"dlrm-overlap: {ENDED_AT_ONCE if again else ENDS_SOON}")
                if again:
                    os._exit(128 + number)
