"""Runs that are killed again and again, and a long one. `make soak` runs them for half an hour.

`SOAK_ROUNDS` and `SOAK_SECONDS` set how long; without them they take a minute, as slow tests.
"""

import os
import signal
import statistics
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest

from dlrm_overlap.checkpoint.manifest import checkpoint_folders, read_manifest
from dlrm_overlap.checkpoint.tools import verify
from dlrm_overlap.launching.lifetime import SAVED
from tests.conftest import read_metrics
from tests.distributed.faults import Run, children_of, train

pytestmark = pytest.mark.slow
ROUNDS = int(os.environ.get("SOAK_ROUNDS", "4"))
SECONDS = float(os.environ.get("SOAK_SECONDS", "25"))
FOREVER = "1000000"
EVERY_STEP = ["--embedding.backend", "pgas", "--log.every", "1", "--checkpoint.every", "1", "--checkpoint.keep", "3"]
EVERY_STEP += ["--train.eval_every", "7", "--data.eval_samples", "1024", "--train.batch_size", "64"]
_MOST_GROWTH = 0.02


def _strike(run: Run, victim: str) -> int:
    """Kill one of the run's processes, or ask it to end, and return its exit code when all its processes have ended."""
    if victim == "asked":
        run.process.terminate()
    elif victim == "all":
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)
    elif victim == "launcher" or not (ranks := children_of(run.process.pid)):
        run.process.kill()
    else:
        os.kill(ranks[int(victim) % len(ranks)], signal.SIGKILL)
    code, _ = run.end(60)
    return code


def test_random_kills_and_resumes_lose_nothing(tmp_path: Path) -> None:
    """After each kill, every checkpoint is complete; at the end, the losses have the bits of an undisturbed run's."""
    random, folder, whole = Random(0), tmp_path / "struck", tmp_path / "whole"
    folder.mkdir()
    whole.mkdir()
    checkpoints = folder / "run" / "checkpoints"
    for number in range(ROUNDS):
        how = ["--checkpoint.asynchronous", random.choice(["true", "false"])]
        run = train(folder, *EVERY_STEP, *how, "--train.steps", FOREVER, launcher="forked")
        if random.random() < 0.8:  # else while it starts, resumes or takes its first steps
            run.wait_for(": loss")
        time.sleep(random.uniform(0, 1))
        victim = random.choice(["0", "1", "launcher", "all", "asked"])
        code = _strike(run, victim)
        assert code == SAVED or (code and victim != "asked") or ": loss" not in run.errors.read_text(), (number, victim)
        for path in checkpoint_folders(checkpoints):
            assert verify(path) == [], (number, victim)
    reached = max((read_manifest(path).step for path in checkpoint_folders(checkpoints)), default=0)
    steps = ["--train.steps", str(reached + 5)]
    for each in (folder, whole):
        code, errors = train(each, *EVERY_STEP, *steps, launcher="forked").end(60 + reached)
        assert code == 0, errors
    assert read_metrics(folder / "run", "train/loss") == read_metrics(whole / "run", "train/loss")
    struck, expected = (read_metrics(each / "run", "eval/auroc") for each in (folder, whole))
    assert struck == {step: expected[step] for step in struck}, "where it was asked to end, it did not evaluate"
    assert max(struck) == max(expected)


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_no_process_grows(tmp_path: Path) -> None:
    """The launcher, ranks and loader processes of a run that logs, evaluates and saves all the time.

    The median memory of each process over the last third of the time is compared with that over the second third.
    """
    often = ["--checkpoint.every", "10", "--checkpoint.asynchronous", "true", "--train.eval_every", "25"]
    often += ["--embedding.backend", "pgas", "--data.eval_samples", "1024", "--train.steps", FOREVER]
    run = train(tmp_path, *often)
    run.wait_for(": loss")
    begin, seen = time.monotonic(), defaultdict[int, list[int]](list)
    samples = 0
    while (passed := time.monotonic() - begin) < SECONDS:
        assert run.process.poll() is None, run.errors.read_text()
        if passed > SECONDS / 3:
            samples += 1
            for pid in run.processes():
                try:
                    seen[pid].append(_resident_bytes(pid))
                except OSError:
                    continue  # a loader process of an evaluation has just ended
        time.sleep(SECONDS / 100)
    run.process.send_signal(signal.SIGINT)
    run.end(30)
    lasting = {pid: sizes for pid, sizes in seen.items() if len(sizes) == samples}
    assert len(lasting) == 5, "the launcher, two ranks, a loader process each"
    for pid, sizes in lasting.items():
        before, after = statistics.median(sizes[: samples // 2]), statistics.median(sizes[samples // 2 :])
        assert after <= before * (1 + _MOST_GROWTH), f"process {pid} went from {before} to {after} bytes"
