import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.agreement import LOSS_TOLERANCE
from tests.conftest import assert_losses_agree
from tests.distributed.workers import make_trainer, quickstart

SMALL = ["--train.batch_size", "64", "--train.steps", "6", "--train.eval_every", "3", "--data.eval_samples", "256"]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["dot", "dcn"])
def test_a_compiled_dense_part_trains_the_same_and_is_compiled_once(tmp_path: Path, arch: str) -> None:
    shape = [*SMALL, "--model.arch", arch, *(["--model.cross_rank", "8"] if arch == "dcn" else [])]
    eager = make_trainer(quickstart(tmp_path, "eager", *shape))
    eager.fit()
    torch._dynamo.reset()
    counters.clear()
    compiled = make_trainer(quickstart(tmp_path, "compiled", *shape, "--train.compile_dense", "true"))
    assert counters["stats"]["unique_graphs"] == 2, "the bottom MLP and the head, before DDP wraps them"
    assert all(parameter.grad is None for parameter in compiled.model.parameters())
    compiled.fit()
    assert counters["stats"]["unique_graphs"] == 3, "the first step compiles the loss, and no other one anything"
    assert_losses_agree(tmp_path / "compiled", tmp_path / "eager", LOSS_TOLERANCE["rowwise_adagrad"])
    assert compiled.model.state_dict().keys() == eager.model.state_dict().keys()
