"""The programs of this folder, as they are and with the two lines changed that use this package. Imports no pytest."""

import gc
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap import GraphTrainPipeline
from tests.agreement import LOSS_TOLERANCE, assert_near

_HERE = Path(__file__).parent
PROGRAMS = sorted(path.stem for path in _HERE.glob("*.py") if "\ndef main(" in path.read_text())
CHANGED = {  # line of a program -> its replacement
    "from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder": (
        "from dlrm_overlap import OverlapEmbeddingBagCollectionSharder as EmbeddingBagCollectionSharder"
    ),
    "from torchrec.distributed.sharding_plan import get_default_sharders": (
        "from dlrm_overlap import get_default_sharders"
    ),
    "from torchrec.distributed.train_pipeline import TrainPipelineSparseDist": (
        "from dlrm_overlap import GraphTrainPipeline as TrainPipelineSparseDist"
    ),
}


def load(name: str, ours: bool) -> ModuleType:
    """Return the module of a program; with `ours`, of its text with exactly two lines changed."""
    path = _HERE / f"{name}.py"
    lines = path.read_text().splitlines()
    if ours:
        assert sum(line in CHANGED for line in lines) == 2, f"{name}: a sharder and a pipeline are imported once each"
        lines = [CHANGED.get(line, line) for line in lines]
    module = ModuleType(name)
    exec(compile("\n".join(lines), str(path), "exec"), module.__dict__)
    return module


def compare(name: str, steps: int, tolerance: float = LOSS_TOLERANCE["programs"]) -> None:
    """Check that a program gives the same losses with two lines changed, on the ranks of the process group."""
    torchrec, ours = (_run(name, ours, steps) for ours in (False, True))
    assert_near(ours, torchrec, tolerance, f"{name}: losses")


def _run(name: str, ours: bool, steps: int) -> torch.Tensor:
    program, made = load(name, ours), list[GraphTrainPipeline]()
    if ours:

        def make(*arguments: Any) -> GraphTrainPipeline:
            made.append(GraphTrainPipeline(*arguments))
            return made[-1]

        program.__dict__["TrainPipelineSparseDist"] = make
    losses = torch.cat([loss.reshape(-1) for loss in program.main(steps)]).cpu()
    assert not ours or (made and made[0]._fallback is None), f"{name}: the steps are TorchRec's"
    dist.barrier()
    gc.collect()  # a program usually ends with its process
    return losses
