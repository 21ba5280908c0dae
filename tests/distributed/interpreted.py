"""The GPU's parts of an exchange on CPU tensors: its kernels run by Triton's interpreter, without streams.

A wait counts its turns there: 1e9 are a second.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist

from dlrm_overlap.backends import Implementation
from dlrm_overlap.comm.arena import Region, open_arena
from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.embedding import opening
from dlrm_overlap.embedding.backends import push, puts
from dlrm_overlap.embedding.backends.base import Forward
from dlrm_overlap.embedding.backends.fused import SlicedForward
from dlrm_overlap.embedding.fused_tables import FusedTables
from dlrm_overlap.embedding.opening import ExchangeParts, build_exchange
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions, StepCounters
from dlrm_overlap.kernels.network import Network
from dlrm_overlap.torchrec_private.check import check_private_api
from tests.distributed.tiny_stage import CPU, Stage
from tests.kernels.gradients import sort_ids


class SharedHeap:
    """A heap shared by the processes of one node, into which interpreted kernels put by stores."""

    def __init__(self, size_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._arena = open_arena({"heap": Region((size_bytes,), torch.uint8)}, group, device)
        self.local = self._arena.local("heap")
        self.network = Network("stores", self._arena.addresses("heap"), group.rank())
        self.close = self._arena.close


def interpreted_parts(
    stage: Stage, group: dist.ProcessGroup, options: ExchangeOptions, samples: int, reach: Reach | None = None
) -> ExchangeParts:
    """Return the GPU's parts of an exchange; make and use a backward of its own in `without_streams`.

    `reach` gives the nodes; without it, the options do.
    """
    for lookup in stage.tables.lookups:  # where a GPU's lookup has them
        lookup.weights_dev, lookup.momentum1_dev = lookup.weights_host, lookup.momentum1_host
    load = Implementation.load
    on_gpu = patch.object(Implementation, "load", lambda implementation, _: load(implementation, "cuda"))
    with on_gpu, patch.object(opening, "ON_CPU", opening.ON_GPU):
        context = stage.layout, stage.tables, options, group, CPU, samples, StepCounters(CPU)
        parts = build_exchange(ExchangeContext(*context, reach=reach))
    if isinstance(parts.forward, SlicedForward):
        parts.forward.grid = lambda *_: 2  # type: ignore[method-assign]
    return parts


def updating(tables: FusedTables) -> FusedTables:
    """Let a lookup on a CPU update its rows by our kernels, as on a GPU; use it in `without_streams`."""
    check_private_api()  # of FBGEMM's own operators, before `without_streams` replaces one
    for name in ("weights", "momentum1"):
        if hasattr(tables, f"{name}_host"):
            setattr(tables, f"{name}_dev", getattr(tables, f"{name}_host"))
    tables._updates = True
    return tables


def interpreted_forward(stage: Stage, group: dist.ProcessGroup, options: ExchangeOptions, samples: int) -> Forward:
    return interpreted_parts(stage, group, replace(options, backward="collective"), samples).forward


@contextlib.contextmanager
def without_streams() -> Iterator[None]:
    """Run work of any stream at once, and sort ids on the CPU, as FBGEMM does on GPUs only.

    Few programs send gradients, each with several tasks, since the interpreter runs one after the other.
    """
    stream = MagicMock(return_value=MagicMock())
    with (
        patch.multiple(torch.cuda, Stream=stream, Event=stream, current_stream=stream, stream=contextlib.nullcontext),
        patch.multiple(
            torch._C,
            create=True,
            _cuda_getCurrentRawStream=stream,
            _cuda_getCurrentStream=lambda _: (),
            _cuda_setStream=stream,
        ),
        patch.multiple(push, _REMOTE_PROGRAMS=2, _ALONE_PROGRAMS=3),
        patch.object(puts, "NvshmemHeap", SharedHeap),
        patch.object(torch.Tensor, "record_stream", lambda *_: None),
        patch.object(torch.ops.fbgemm, "transpose_embedding_input", _transpose_embedding_input),
    ):
        yield


def _transpose_embedding_input(
    first_keys: torch.Tensor,
    key_bits: int,
    values: torch.Tensor,
    offsets: torch.Tensor,
    info_B_num_bits: int = 26,
    info_B_mask: int = (1 << 26) - 1,
    nobag: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return those results of FBGEMM's operator that `SortedIds` uses."""
    features = first_keys.numel() - 1
    samples = (offsets.numel() - 1) // features
    assert samples <= info_B_mask + 1
    assert first_keys[-1] <= 1 << key_bits
    bags = torch.arange(offsets.numel() - 1).repeat_interleave(offsets.diff())
    keys = first_keys[bags // samples] + values
    run_keys, run_starts, run_count, infos = sort_ids(keys, bags, samples, info_B_num_bits)
    if nobag:
        position = keys.argsort(stable=True)
        infos = position * features + (bags // samples)[position]
    return keys, None, infos, run_keys, None, run_count, run_starts
