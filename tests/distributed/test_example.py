"""The example, a model of the reader's own, trains under the drop-in as under stock TorchRec, and is profiled."""

import os
import re
import subprocess
import sys

import pytest

from tests.agreement import LOSS_TOLERANCE
from tests.conftest import PYTHON_PATH, ROOT

STEPS = 50


PROFILED = ["-m", "dlrm_overlap", "profile", "--after", "5", "--to_end", "true", "--", sys.executable]


def train(backend: str, *before: str) -> tuple[list[float], str]:
    """Return the losses that the example prints when 2 CPU processes train it, and all that it prints."""
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    without_gpus = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *before, *agent, "examples/own_model.py", "--backend", backend, "--steps", str(STEPS)],
        cwd=ROOT,
        env=without_gpus | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = f"backend {backend}: 4 of 4 tables exchanged, update by push\n"
    assert done.stderr.count(told) == (backend != "stock"), done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]
    return losses, done.stdout


@pytest.mark.slow
def test_losses_agree_with_those_of_stock_torchrec() -> None:
    expected, report = train("stock", *PROFILED)
    actual, _ = train("pgas")
    assert len(expected) == STEPS // 10
    assert expected[-1] < 0.9 * expected[0], "it learns"
    assert actual == pytest.approx(expected, rel=LOSS_TOLERANCE["rowwise_adagrad"])
    assert "10 steps by the clock and as many traced, 2 of 2 ranks, cpu" in report
    (step,) = re.findall(r"^step +(\d+\.\d+)", report, re.MULTILINE)
    assert 0 < float(step) < 10_000
    assert all(f"in {name}" in report for name in ("all-to-all", "all-reduce"))
    assert len(re.findall(r"^embedding  t_\w+ +table_wise .* yes +yes", report, re.MULTILINE)) == 4, report
