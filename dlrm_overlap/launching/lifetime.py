"""How long a process lives: it ends with its parent, and with what exit code once it was asked to end."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

LAUNCHER_PID = "DLRM_OVERLAP_LAUNCHER_PID"  # set by `spawn` in its workers
SAVED = 75
"""exit code of a run that was asked to end, and can go on from what it has saved: EX_TEMPFAIL of sysexits.h"""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
