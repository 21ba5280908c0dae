"""Settings of TorchRec that no key expresses, for contenders of `bench step`."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import config as dynamo
from torch.nn.functional import linear
from torchrec.distributed.train_pipeline import TrainPipelinePT2, TrainPipelineSparseDist
from torchrec.modules.crossnet import LowRankCrossNet

from dlrm_overlap.train.model import DLRM

# What TrainPipelinePT2 sets when it compiles, which would change how later contenders are compiled.
_DYNAMO_KEYS = (
    "capture_scalar_outputs",
    "capture_dynamic_output_shape_ops",
    "force_unspec_int_unbacked_size_like_on_torchrec_kjt",
    "skip_torchrec",
)


class CastBiasesCrossNet(nn.Module):
    """TorchRec's low-rank cross network, whose biases are cast to the dtype of the products.

    TorchRec adds float32 biases, so under autocast its x_l are float32 [b, N]; here they have the input's dtype.
    Parameters and their names stay the same.
    """

    def __init__(self, network: LowRankCrossNet) -> None:
        super().__init__()
        self.W_kernels, self.V_kernels, self.bias = network.W_kernels, network.V_kernels, network.bias

    def forward(self, x_0: torch.Tensor) -> torch.Tensor:
        """Map [b, N] to [b, N]."""
        x = x_0
        for w, v, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            product = linear(linear(x, v), w)
            x = x_0 * (product + bias.to(product.dtype)) + x
        return x


def cast_cross_biases(dlrm: DLRM) -> None:
    """Let the cross network of `dlrm` cast its biases; does nothing to another interaction. Call before compiling."""
    if isinstance(dlrm.head.interaction, LowRankCrossNet):
        dlrm.head.interaction = CastBiasesCrossNet(dlrm.head.interaction)


class RegisteredPipeline(TrainPipelineSparseDist[Any, Any]):
    """TorchRec's pipeline, whose steps allocate memory that is registered with NCCL, so that NCCL copies less.

    The memory is NCCL's (`ncclMemAlloc`), and torch registers each new segment with the communicator of the default
    group (`ncclCommRegister`). Outputs of collectives and what the eager part of a step computes are allocated there;
    memory of the dense part's CUDA graphs is not.
    """

    def __init__(self, model: Any, optimizer: Any, device: torch.device) -> None:
        super().__init__(model, optimizer, device, execute_all_batches=True)
        group: Any = dist.group.WORLD
        backend = group._get_backend(device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(self._pool)

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        # Only the current thread allocates in the pool, so the backward runs in it too.
        with torch.cuda.use_mem_pool(self._pool), torch.autograd.set_multithreading_enabled(False):
            return super().progress(dataloader_iter)


class CompiledPipeline(TrainPipelinePT2[Any, Any]):
    """TorchRec's `TrainPipelinePT2`, which compiles the whole model, lookups and collectives included."""

    def __init__(self, model: Any, optimizer: Any, device: torch.device) -> None:
        super().__init__(model, optimizer, device)
        self._dynamo = {key: getattr(dynamo, key) for key in _DYNAMO_KEYS}

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        with dynamo.patch(self._dynamo):  # restores the values of others at the end of the step
            output = super().progress(dataloader_iter)
            self._dynamo = {key: getattr(dynamo, key) for key in _DYNAMO_KEYS}  # later steps may compile again
        return output

    def reset(self) -> None:
        """Do nothing: no batch is read ahead."""
