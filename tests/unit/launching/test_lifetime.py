"""What a process does that is asked to end before it can save."""

import subprocess
import sys

import pytest

from dlrm_overlap.launching.lifetime import SAVED
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
