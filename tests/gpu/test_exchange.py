"""The embedding exchange on GPUs: checks that `python -m tests.gpu.exchange` runs, without pytest too."""

import json
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.gpu.exchange.checks import CHECKS
from tests.gpu.exchange.ranks import SKIPPED

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
_RANKS_PER_GPU = 2 if torch.cuda.device_count() == 1 else 1
_BUDGET_S = 540 * _RANKS_PER_GPU


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output = tmp_path_factory.mktemp("exchange") / "outcomes.json"
    argv = ["--ranks_per_gpu", str(_RANKS_PER_GPU), "--budget_s", str(_BUDGET_S), "--output", str(output)]
    subprocess.run([sys.executable, "-m", "tests.gpu.exchange", *argv], cwd=ROOT, timeout=_BUDGET_S + 60, check=False)
    return json.loads(output.read_text())


@pytest.mark.parametrize("name", CHECKS)
def test_exchange(outcomes: dict[str, str], name: str) -> None:
    if outcomes[name].startswith(SKIPPED):
        pytest.skip(outcomes[name].removeprefix(SKIPPED))
    assert outcomes[name] == "ok", outcomes[name]
