"""The GPU's side of an exchange on CPU tensors: its kernels run by Triton's interpreter, on no streams.

A wait counts turns there, 1e9 a second.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist

from dlrm_overlap.embedding.backends.base import ExchangeOptions, Forward
from dlrm_overlap.embedding.backends.collective import CollectiveForward
from dlrm_overlap.embedding.backends.device_forward import DeviceForward, DeviceLookup
from dlrm_overlap.embedding.backends.push import DevicePush
from dlrm_overlap.embedding.protocol.gradients import GradientLayout
from tests.distributed.stage import CPU, Stage
from tests.kernels.gradients import sort_ids


class InterpretedForward(DeviceForward):
    """Its forward."""

    def _grid(self, *_: Any) -> int:
        return 2


class InterpretedCollective(CollectiveForward):
    """The same of the ablation: the zero-copy kernel into a send buffer, then the collective."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._device = DeviceLookup(self, self._columns)


def interpreted_forward(stage: Stage, group: dist.ProcessGroup, options: ExchangeOptions, samples: int) -> Forward:
    """Return the GPU's way through an exchange's forward."""
    arguments = stage.layout, stage.tables, options, group, CPU
    if options.backend == "nccl":
        return InterpretedCollective(*arguments)
    return InterpretedForward(*arguments, samples_per_rank=samples)


def interpreted_push(
    stage: Stage, group: dist.ProcessGroup, options: ExchangeOptions, samples: int
) -> tuple[InterpretedForward, DevicePush]:
    """Return its way through forward and backward; to be made and used within `without_streams`."""
    for lookup in stage.tables.lookups:  # which a CPU's lookup keeps elsewhere
        lookup.weights_dev, lookup.momentum1_dev = lookup.weights_host, lookup.momentum1_host
    arguments = stage.layout, stage.tables, options, group, CPU
    gradients = GradientLayout(stage.layout, samples, options.wire_dtype)
    forward = InterpretedForward(*arguments, samples_per_rank=samples, beside=gradients.regions())
    return forward, DevicePush(*arguments, gradients=gradients, arena=forward.windows.arena)


@contextlib.contextmanager
def without_streams() -> Iterator[None]:
    """Let what is issued run at once, whatever its stream, and FBGEMM sort on the CPU, which it cannot."""
    stream = MagicMock(return_value=MagicMock())
    with (
        patch.multiple(torch.cuda, Stream=stream, Event=stream, current_stream=stream, stream=contextlib.nullcontext),
        patch.object(torch.Tensor, "record_stream", lambda *_: None),
        patch.object(torch.ops.fbgemm, "transpose_embedding_input", _transpose_embedding_input),
    ):
        yield


def _transpose_embedding_input(
    first_keys: torch.Tensor,
    key_bits: int,
    values: torch.Tensor,
    offsets: torch.Tensor,
    info_B_num_bits: int,
    info_B_mask: int,
) -> tuple[torch.Tensor | None, ...]:
    """Return what FBGEMM's operator of this name does, as far as it is used: see `SortedIds`."""
    features = first_keys.numel() - 1
    samples = (offsets.numel() - 1) // features
    assert samples <= info_B_mask + 1
    assert first_keys[-1] <= 1 << key_bits
    bags = torch.arange(offsets.numel() - 1).repeat_interleave(offsets.diff())
    keys = first_keys[bags // samples] + values
    run_keys, run_starts, run_count, infos = sort_ids(keys, bags, samples, info_B_num_bits)
    return None, None, infos, run_keys, None, run_count, run_starts
