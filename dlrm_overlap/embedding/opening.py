"""The opening of an exchange, before its first step: who is reached how, its windows, and its parts."""

import logging
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.backends import BACKENDS, BACKWARDS, BACKWARDS_INTERNODE
from dlrm_overlap.comm.arena import Arena, Region, open_arena
from dlrm_overlap.comm.network import start_puts
from dlrm_overlap.comm.reach import Reach, find_reach
from dlrm_overlap.embedding.backends.base import Backward, Forward
from dlrm_overlap.embedding.backends.ids import CpuIdExchange, IdExchange
from dlrm_overlap.embedding.backends.local import CpuLocalLookup, DeviceLocalLookup, LocalLookup
from dlrm_overlap.embedding.internode import Crossing, arrival_regions
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions
from dlrm_overlap.embedding.windows import WindowPair

log = logging.getLogger("dlrm_overlap")


def reach_of(options: ExchangeOptions, group: dist.ProcessGroup, device: torch.device) -> Reach:
    """Return which ranks this one reaches by stores, the others being reached by messages; a collective.

    Where there are others, rank 0's log says so, and kernels can put to them from now on, if the options ask for that.

    Raises:
        InputError: if some rank cannot put.
    """
    if not BACKENDS[options.backend].stores_to_peers:
        return Reach.of_one_node(group)  # a collective reaches all alike, and needs no look
    reach, puts = find_reach(group, device, options.nodes), options.internode == "puts"
    if reach.whole:
        return reach
    if puts:
        start_puts(group, device, options.wait_timeout_s)
    if reach.rank == 0:
        by = ("NCCL" if device.type == "cuda" else "gloo") + ", pooled rows by puts of NVSHMEM" * puts
        text = "backend %s: %s: stores within a node; between nodes one message a node and rank each way, by %s"
        log.warning(text, options.backend, reach.summary(), by)
    return reach


class ExchangeParts(NamedTuple):
    """An open exchange."""

    forward: Forward
    backward: Backward
    ids: IdExchange | None
    """brings ids to the owners of their rows, where that is not left to TorchRec"""
    local: LocalLookup | None
    """looks up the tables that every rank holds, where that is not left to TorchRec"""
    arena: Arena | None
    """memory of every rank's windows and flags; None where no part has windows"""

    def close(self) -> None:
        """Give the memory back, with the last references. Every rank must be through with its steps."""
        for part in (self.forward, self.backward, self.ids, self.arena):
            if part is not None:
                part.close()


def build_exchange(context: ExchangeContext) -> ExchangeParts:
    """Make the parts that the options name, and their windows; a collective.

    Raises:
        InputError: if there is no room for the windows, or the ranks do not reach each other's memory.
    """
    options, group, device = context.options, context.group, context.device
    reach = context.reach or reach_of(options, group, device)
    context = replace(context, reach=reach)
    backend = BACKENDS[options.backend]
    forward = backend.forward if reach.whole else backend.forward_internode or backend.forward
    assert forward is not None, f"backend {options.backend} has no exchange of ours"
    backward = (BACKWARDS if reach.whole else BACKWARDS_INTERNODE)[options.resolved_backward]
    make_forward, make_backward = forward.load(device.type), backward.load(device.type)
    specs = [make_forward.window_spec(context), make_backward.window_spec(context)]
    specs.append(context.ids.windows if context.ids is not None else None)
    regions: dict[str, Region] = {}
    for spec in specs:
        regions |= spec.regions(group.size()) if spec else {}
    if context.ids is not None:
        regions |= arrival_regions(context.ids.windows, reach)
    crossing = Crossing(context.layout, reach, options.wire_dtype, make_forward.with_sums)
    if sums := crossing.sum_windows(context.samples_per_rank):
        regions |= sums.regions(group.size())
    arena = open_arena(regions, group, device, reach) if regions else None
    counters = context.counters.forward, context.counters.backward, context.counters.ids
    outputs, gradients, ids = (
        WindowPair(spec, arena, counter) if spec and arena else None
        for spec, counter in zip(specs, counters, strict=True)
    )
    on_gpu = device.type == "cuda"
    id_exchange: IdExchange | None = None
    if context.ids is not None:
        assert ids is not None
        id_exchange = (IdExchange if on_gpu else CpuIdExchange)(context, context.ids, ids)
    local: LocalLookup | None = None
    if context.layout.replicated:
        assert outputs is not None
        local = (DeviceLocalLookup if on_gpu else CpuLocalLookup)(context, outputs)
    return ExchangeParts(make_forward(context, outputs), make_backward(context, gradients), id_exchange, local, arena)
