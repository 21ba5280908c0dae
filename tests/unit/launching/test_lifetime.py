"""What a process does that is asked to end before it can save, and where it says so."""

import os
import signal
import subprocess
import sys

import pytest

from dlrm_overlap.launching.lifetime import ENDED_AT_ONCE, ENDS_SOON, SAVED
from tests.conftest import ROOT

# Is asked to end at once, and needs argv[1] seconds to meet the other ranks, for whom it waits 0.3 s.
MEETS = """
import signal, sys, time
from dlrm_overlap.launching import lifetime
lifetime._GRACE_S = 0.3
end = lifetime.EndRequest()
end.listen()
signal.raise_signal(signal.SIGTERM)
with end.while_ranks_meet():
    time.sleep(float(sys.argv[1]))
time.sleep(0.5)
print("met")
"""


@pytest.mark.parametrize(("meets_s", "code", "out"), [("0.1", 0, "met\n"), ("20", SAVED, "")])
def test_other_ranks_are_not_waited_for_once_it_is_asked_to_end(meets_s: str, code: int, out: str) -> None:
    argv = [sys.executable, "-c", MEETS, meets_s]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=15, check=False, cwd=ROOT)
    told = "dlrm-overlap: asked to end before all ranks had met; the same command begins anew\n" if code else ""
    assert (result.returncode, result.stdout, result.stderr) == (code, out, told)


# Presses Ctrl-C so often as argv[1] says, and ends well half a second later.
PRESSES = """
import signal, sys, time
from dlrm_overlap.launching import lifetime
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[2] == "ignored" else signal.default_int_handler)
end = lifetime.EndRequest()
end.listen(answers=sys.argv[2] == "first")
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
    argv = [sys.executable, "-c", PRESSES, str(times), rank]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=15, check=False, cwd=ROOT)
    lines = "".join(f"dlrm-overlap: {line}\n" for line in told)
    assert (result.returncode, result.stdout, result.stderr) == (code, out, lines)


def test_it_ends_though_nobody_reads_what_it_says() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    argv = [sys.executable, "-c", MEETS, "5"]
    ended = subprocess.run(argv, stderr=write_end, stdout=subprocess.PIPE, timeout=15, check=False, cwd=ROOT)
    os.close(write_end)
    assert (ended.returncode, ended.stdout) == (SAVED, b"")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_takes_the_place_of_a_stream_that_is_closed(closed: str) -> None:
    program = (
        "import os, sys; from dlrm_overlap.launching.lifetime import open_streams; open_streams(); "
        "assert os.open('/', os.O_RDONLY) > 2; print('told', flush=True), print('told', file=sys.stderr)"
    )
    command = f'exec "$0" -c "{program}" {closed}'
    assert subprocess.run(["sh", "-c", command, sys.executable], timeout=15, check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize(("given", "spins"), [({}, 0), ({"OMP_WAIT_POLICY": "active"}, 30_000_000_000)])
def test_threads_sleep_while_they_wait_unless_told_otherwise(given: dict[str, str], spins: int) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environ |= {"OMP_DISPLAY_ENV": "verbose"} | given  # has OpenMP's library write what it takes
    argv = [sys.executable, "-m", "dlrm_overlap", "doctor"]  # loads torch
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env=environ)
    assert f"GOMP_SPINCOUNT = '{spins}'" in result.stderr
