"""The shape of dlrm's dlrm_main.py: pipelines for training and validation, and a schedule of learning rates."""

import itertools

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.programs.clicks import clicks, collection, start

ROWS = {f"cat_{i}": 100 * (i + 1) for i in range(6)}
WARMUP, DECAY_START, DECAY = 20, 60, 100


class Policy(LRScheduler):
    """Learning rates rise linearly, stay, and fall as a parabola."""

    def get_lr(self) -> list[float]:
        step, factor = self._step_count, 1.0
        if step < WARMUP:
            factor = 1 - (WARMUP - step) / WARMUP
        elif step >= DECAY_START:
            factor = max(0.02, (1 - min(step - DECAY_START, DECAY) / DECAY) ** 2)
        return [base * factor for base in self.base_lrs]


def evaluate(pipeline: TrainPipelineSparseDist, steps: int) -> torch.Tensor:
    pipeline._model.eval()
    pipeline._connected = False
    batches, losses = clicks(ROWS, 3, 8, 48, steps, seed=1), []
    with torch.no_grad():
        while True:
            try:
                losses.append(pipeline.progress(batches)[0].clone())
            except StopIteration:
                return torch.stack(losses).mean()


def main(steps: int = 200) -> list[torch.Tensor]:
    """Train two epochs, and return the losses of training and validation."""
    device = start()
    torch.manual_seed(1)
    model = DLRMTrain(DLRM_DCN(collection(ROWS, 16), 8, [32, 16], [32, 16, 1], 2, 8, dense_device=device))
    apply_optimizer_in_backward(torch.optim.Adagrad, model.model.sparse_arch.parameters(), {"lr": 0.05})
    sharders = get_default_sharders()
    topology = Topology(dist.get_world_size(), device.type, local_world_size=get_local_size())
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=32)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=model, device=device, plan=plan, sharders=sharders)

    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense_optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.01))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])
    scheduler = Policy(optimizer)
    train_pipeline = TrainPipelineSparseDist(model, optimizer, device)
    val_pipeline = TrainPipelineSparseDist(model, optimizer, device)

    losses = []
    for epoch in range(2):
        train_pipeline._model.train()
        train_pipeline._connected = False
        batches = clicks(ROWS, 3, 8, 32, steps // 2, seed=2 + epoch)
        for step in itertools.count(1):
            try:
                loss, _logits, _labels = train_pipeline.progress(batches)
                losses.append(loss.clone())
                scheduler.step()
                if step % 30 == 0:
                    losses.append(evaluate(val_pipeline, 2))
                    train_pipeline._model.train()
            except StopIteration:
                break
        losses.append(evaluate(val_pipeline, 4))
    return losses
