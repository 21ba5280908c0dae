"""TorchRec's exchange and pipeline with this project's dense part, so that contenders differ in the exchange alone."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.comm.reach import find_reach
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.functions import store_options
from dlrm_overlap.dense.tensor_parallel import shards_of
from dlrm_overlap.embedding.options import WIRE_DTYPES
from dlrm_overlap.torchrec_private.attributes import leave_ddp
from dlrm_overlap.train.dense_part import cast_once, in_flat_order
from dlrm_overlap.train.graphs.dense_step import DenseStep, dense_parameters
from dlrm_overlap.train.trainer import Trainer


class OurDensePipeline(TrainPipelineSparseDist[Any, Any]):
    """TorchRec's pipeline, in which a `DenseStep` clears, averages and applies the dense gradients.

    The tables stay with TorchRec. As in `GraphTrainPipeline`, the dense parameters are flat and, in bf16, cast once a
    step by the kernel that updates them, and the cross network, the layers with ReLU and the interaction run in our
    kernels if `train.compile_dense` is set.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Take the trainer's model out of DDP, and make its dense parameters flat; a collective."""
        config, model, group = trainer.config, trainer.model, dist.group.WORLD
        assert group is not None, "the process group is made before the trainer"
        leave_ddp(model)
        casts = None
        if config.train.flat_dense and config.train.precision == "bf16":
            task: Any = model.module
            task.dlrm.bottom.in_training = task.dlrm.head.in_training = None  # compiled for weights in float32
            parameters = in_flat_order(task, dense_parameters(model))
            flat = FlatParameters(parameters, shards_of(model), torch.bfloat16)
            casts = cast_once(task, flat, config.train.compile_dense, cross_kernel=config.train.cross_kernel)
        # As a captured step of the same run would average dense gradients.
        reaches_all = len(find_reach(group, trainer.device, config.embedding.nodes).here) == group.size()
        wait_timeout_s = config.embedding.wait_timeout_s
        stores = store_options(config.train.dense_reduce, trainer.device, reaches_all, wait_timeout_s)
        about = casts, group, CommunicationOrder(), WIRE_DTYPES[config.train.gradient_dtype], stores
        self._dense = DenseStep(model, trainer.optimizer, *about, dense_update=config.train.dense_update)
        super().__init__(model, _DenseOptimizer(self._dense), trainer.device, execute_all_batches=True)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise the errors that kernels have recorded."""
        self._dense.buckets.check()

    def close(self) -> None:
        """Free the memory that peers access; no rank may be in a step."""
        self._dense.close()


class _DenseOptimizer:
    """What TorchRec's pipeline calls before each forward and after each backward."""

    def __init__(self, dense: DenseStep) -> None:
        self._dense, self._is_new = dense, True

    def zero_grad(self) -> None:
        if self._is_new:
            self._dense.cast_shadow()
            self._is_new = False
        self._dense.clear()
        self._dense.begin()

    def step(self) -> None:
        self._dense.update()
        self._dense.update_after()
        for fused in self._dense.fused:  # sets the tables' learning rates, which the backward has used
            fused.step()
