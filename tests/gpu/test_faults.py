"""Ranks on GPUs that are stopped, killed and asked to end between captured steps."""

import re
import signal
import time
from pathlib import Path

import pytest
import torch

from dlrm_overlap.launching.lifetime import SAVED
from tests.distributed.faults import assert_same_bits, fail_at, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
ON_GPUS = ["--train.device", "cuda", "--train.steps", "1000000", "--embedding.wait_timeout_s", "20"]


@pytest.mark.parametrize("backend", ["torchrec", "pgas", "fused"])
def test_a_stopped_rank_is_named_within_the_timeout(tmp_path: Path, backend: str) -> None:
    run = train(tmp_path, *ON_GPUS, "--embedding.backend", backend, fault=fail_at(1, 42, "stop"))
    run.wait_for("step 35 of ", timeout_s=150)
    begin = time.monotonic()
    code, errors = run.end(90)
    assert time.monotonic() - begin < 60
    assert code, errors
    assert re.search(r"rank 0 waited 20 s for .* of rank 1: expected epoch|rank 1: silent, last heard in step", errors)


def test_a_killed_rank_is_named_at_once(tmp_path: Path) -> None:
    run = train(tmp_path, *ON_GPUS, "--embedding.backend", "fused", fault=fail_at(1, 42, "kill"))
    run.wait_for("step 35 of ", timeout_s=150)
    code, errors = run.end(30)
    assert code == 128 + signal.SIGKILL
    assert re.search(r"dlrm-overlap: rank 1 \(pid \d+\) was killed by SIGKILL", errors)


@pytest.mark.parametrize("backend", ["torchrec", "fused"])
def test_a_run_that_is_asked_to_end_saves_what_it_resumes_from(tmp_path: Path, backend: str) -> None:
    run = train(tmp_path, *ON_GPUS, "--embedding.backend", backend, fault=fail_at(1, 42, "term"))
    code, errors = run.end(200)
    assert code == SAVED, errors
    (step,) = re.findall(r"asked to end: step (\d+) is saved", errors)
    run = train(tmp_path, *ON_GPUS, "--embedding.backend", backend, "--train.steps", str(int(step) + 20))
    code, errors = run.end(200)
    assert code == 0, errors
    assert f"after step {step}" in errors


@pytest.mark.parametrize("backend", ["pgas", "fused"])
def test_captured_runs_of_one_seed_end_with_the_same_bits_though_a_rank_is_killed(tmp_path: Path, backend: str) -> None:
    options = ["--train.device", "cuda", "--embedding.backend", backend, "--train.steps", "120"]
    assert_same_bits(tmp_path, *options, "--train.pipeline", "graph", launcher="nproc")
