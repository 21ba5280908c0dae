"""The example, a model of the reader's own, trains under the drop-in as under TorchRec."""

import os
import re
import subprocess
import sys

import pytest

from tests.agreement import LOSS_TOLERANCE
from tests.conftest import PYTHON_PATH, ROOT

STEPS = 50


def train(backend: str) -> list[float]:
    """Return the losses that the example prints when 2 CPU processes train it."""
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    without_gpus = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *agent, "examples/own_model.py", "--backend", backend, "--steps", str(STEPS)],
        cwd=ROOT,
        env=without_gpus | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = f"backend {backend}: 4 of 4 tables exchanged, update by push\n"
    assert done.stderr.count(told) == (backend != "torchrec"), done.stderr
    assert "warning" not in re.sub(r"(?m)^.*torch/distributed/run.py.*$", "", done.stderr).lower()
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]


@pytest.mark.slow
def test_losses_agree_with_those_of_torchrec() -> None:
    expected, actual = train("torchrec"), train("pgas")
    assert len(expected) == STEPS // 10
    assert expected[-1] < 0.9 * expected[0], "it learns"
    assert actual == pytest.approx(expected, rel=LOSS_TOLERANCE["rowwise_adagrad"])
