"""The model, sharded over the ranks, and the train pipeline that takes its steps."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_overlap.config import Config
from dlrm_overlap.dense.tensor_parallel import shards_of
from dlrm_overlap.train.graphs.parts import why_not_captured
from dlrm_overlap.train.model import TrainTask

log = logging.getLogger("dlrm_overlap")


def shard_model(
    task: TrainTask,
    plan: ShardingPlan,
    sharder: ModuleSharder,
    group: dist.ProcessGroup,
    device: torch.device,
) -> DistributedModelParallel:
    """Shard the tables over the ranks as `plan` says, and put the dense part on every rank, where it stands alone."""
    model = DistributedModelParallel(
        module=task,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=plan,
        sharders=[sharder],
        init_data_parallel=False,
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=True, params_to_ignore=list(shards_of(task))),
    )
    task.to(device)
    return model


def takes_graph(config: Config, model: DistributedModelParallel, device: torch.device) -> bool:
    """Return whether the steps of a sharded model are taken by `GraphTrainPipeline`, alike on all ranks.

    Where the configuration asks for it and it cannot be, the log says why.
    """
    kind = config.train.pipeline
    if kind == "torchrec" or (kind == "auto" and device.type != "cuda"):
        return False
    reason = why_not_captured(model)
    if reason is not None and kind == "graph" and dist.get_rank() == 0:
        log.warning("train.pipeline: torchrec, since the steps cannot be captured: %s", reason)
    return reason is None


def build_pipeline(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, device: torch.device
) -> TrainPipelineSparseDist[Any, Any]:
    """Return TorchRec's train pipeline.

    It works ahead: during a step it sends the ids of the next batch to their owners and copies the one after that to
    the device.
    """
    return TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
