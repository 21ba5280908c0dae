"""What a process does that is asked to end before it can save, and where it says so."""

import signal
import subprocess
import sys

import pytest

from dlrm_overlap.launching.lifetime import ENDED_AT_ONCE, ENDS_SOON, SAVED
from tests.conftest import ROOT

# Presses Ctrl-C so often as argv[1] says, as the first rank after several SIGTERM, and ends well half a second later.
PRESSES = """
import signal, sys, time
from dlrm_overlap.launching import lifetime
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[2] == "ignored" else signal.default_int_handler)
end = lifetime.EndRequest()
end.listen(answers=sys.argv[2] == "first")
if sys.argv[2] == "first":
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
        signal.raise_signal(number)
for _ in range(int(sys.argv[1])):
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.5)
print(end.asked)
"""


@pytest.mark.parametrize(
    ("times", "rank", "code", "out", "told"),
    [
        (1, "first", 0, "True\n", [ENDS_SOON]),
        (1, "another", 0, "True\n", []),
        (2, "first", 128 + signal.SIGINT, "", [ENDS_SOON, ENDED_AT_ONCE]),
        (2, "ignored", 0, "False\n", []),
    ],
)
def test_ctrl_c_asks_a_second_one_ends(times: int, rank: str, code: int, out: str, told: list[str]) -> None:
    assert _run(PRESSES, str(times), rank) == (code, out, "".join(f"dlrm-overlap: {line}\n" for line in told))


def _run(program: str, *argv: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", program, *argv]
    result = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False, cwd=ROOT)
    return result.returncode, result.stdout, result.stderr


FIRST_PROCESS = """
import os, signal, sys
from dlrm_overlap.launching import lifetime
os.getpid = lambda: int(sys.argv[1])
lifetime.block_signals()
signal.raise_signal(signal.SIGTERM)
lifetime.end_on_signals()
print("lives on")
"""


@pytest.mark.parametrize(("pid", "code"), [(1, 128 + signal.SIGTERM), (7, -signal.SIGTERM)])
def test_the_first_process_of_a_container_handles_signals_that_linux_would_drop(pid: int, code: int) -> None:
    assert _run(FIRST_PROCESS, str(pid)) == (code, "", "")


# Is asked to end, and needs argv[1] seconds to meet the other ranks, for which it waits 0.3 s.
MEETS = """
import os, signal, sys, time
from dlrm_overlap.launching import lifetime
lifetime._GRACE_S = 0.3
lifetime.block_signals()
if sys.argv[2] == "before":
    os.kill(os.getpid(), signal.SIGUSR1)
end = lifetime.EndRequest()
end.listen()
with end.while_ranks_meet():
    if sys.argv[2] == "while they meet":
        os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(float(sys.argv[1]))
if sys.argv[2] == "after":
    os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.5)
print(end.asked)
"""


@pytest.mark.parametrize(
    ("meets_s", "asked", "code", "out"),
    [
        *(("0.2", asked, 0, "True\n") for asked in ("while they meet", "before", "after")),
        ("0.2", "never", 0, "False\n"),
        *(("20", asked, SAVED, "") for asked in ("while they meet", "before")),
    ],
)
def test_other_ranks_are_not_waited_for_once_it_is_asked_to_end(meets_s: str, asked: str, code: int, out: str) -> None:
    told = "dlrm-overlap: asked to end before all ranks had started: run the same command again\n" if code else ""
    assert _run(MEETS, meets_s, asked) == (code, out, told)


# Interrupts the thread that looks for requests to end, for a second.
INTERRUPTS = """
import signal, threading, time
from dlrm_overlap.launching import lifetime
signal.signal(signal.SIGURG, lambda *_: None)
end = lifetime.EndRequest()
end.listen()
with end.while_ranks_meet():
    looks, = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    until = time.monotonic() + 1
    while time.monotonic() < until:
        signal.pthread_kill(looks.ident, signal.SIGURG)
print(end.asked)
"""


def test_a_signal_that_asks_for_nothing_asks_for_nothing() -> None:
    assert _run(INTERRUPTS) == (0, "False\n", "")
