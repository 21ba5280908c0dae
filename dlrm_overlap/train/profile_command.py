"""Profiles training steps of any program, before a line of it is changed; loads no torch.

The command runs with a folder of ours in front of PYTHONPATH. Each Python process of it then reads
`injected/sitecustomize.py`, which counts the calls of `progress` of TorchRec's pipelines, or where there are none the
steps of an optimizer. A process that has taken enough of them writes a file, and ends.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.files import make_folder
from dlrm_overlap.observe.profile import Profile, RankProfile

SETTINGS = "DLRM_OVERLAP_PROFILE"
"""variable of the processes that a command starts: settings of `profiling.CountedProgram` as JSON"""
_INJECTED = Path(__file__).parent / "injected"


def run_profiled(command: Sequence[str], steps: int, after: int, folder: Path | None, to_end: bool) -> int:
    """Run a command whose ranks profile themselves, print the report, and return an exit code.

    Args:
        command: a program and its arguments; it starts Python processes, in this environment and on hosts that have it.
        steps: number of steps to time by the clock, and to trace.
        after: number of steps before these.
        folder: takes a file and a trace of each rank; None for a temporary one.
        to_end: let the command run on after the traced steps.

    Raises:
        InputError: if the command cannot be started, or no rank of it took enough steps.
    """
    with tempfile.TemporaryDirectory(prefix="dlrm_overlap_profile_") as temporary:
        folder = (folder or Path(temporary)).resolve()
        make_folder(folder)
        for stale in folder.glob("rank_*.json"):
            stale.unlink()
        settings = {"folder": str(folder), "steps": steps, "after": after, "to_end": to_end}
        path = os.pathsep.join(filter(None, (str(_INJECTED), os.environ.get("PYTHONPATH"))))
        code = _run(command, os.environ | {"PYTHONPATH": path, SETTINGS: json.dumps(settings)})
        files = list(folder.glob("rank_*.json"))
        found = sorted((RankProfile(**json.loads(file.read_text())) for file in files), key=lambda each: each.rank)
    if not found:
        raise InputError(
            f"profile: {command[0]} ended with exit code {code} before a rank had taken {after + 2 * steps + 1} steps "
            f"(calls of progress of TorchRec's pipelines, or steps of an optimizer); lower --after or --steps"
        )
    print(f"\n{Profile(tuple(found))}")
    return code or int(len(found) < found[0].world_size)


def _run(command: Sequence[str], environ: dict[str, str]) -> int:
    """Run a command to its end, which a signal to this process brings about, and return its exit code."""
    try:
        child = subprocess.Popen(command, env=environ)
    except OSError as error:
        raise InputError(f"profile: {command[0]}: {error.strerror}; give a command after --") from None
    signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
    while True:
        try:
            code = child.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:  # which the terminal sends to the command as well
            continue
