"""Makes the parts of an exchange and their windows, before the first step."""

import logging
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.backends import BACKENDS, BACKWARDS
from dlrm_overlap.comm.arena import Arena, Region, open_arena
from dlrm_overlap.comm.network import start_puts
from dlrm_overlap.comm.reach import Reach, find_reach
from dlrm_overlap.embedding.backends.base import Backward, Forward
from dlrm_overlap.embedding.backends.cpu import CpuLookup, CpuSignals
from dlrm_overlap.embedding.backends.ids import CpuIdExchange, IdExchange
from dlrm_overlap.embedding.backends.local import CpuLocalLookup, DeviceLocalLookup, LocalLookup
from dlrm_overlap.embedding.backends.lookup import DeviceLookup, Platform
from dlrm_overlap.embedding.internode import InternodeLayout, arrival_regions
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions
from dlrm_overlap.embedding.windows import DeviceSignals, WindowPair

log = logging.getLogger("dlrm_overlap")


def reach_of(options: ExchangeOptions, group: dist.ProcessGroup, device: torch.device) -> Reach:
    """Return which ranks this one reaches by stores, and which by messages; a collective.

    Between nodes it also starts NVSHMEM if the options ask for puts, and raises an InputError if that fails on a rank.
    """
    if not BACKENDS[options.backend].stores_to_peers:
        return Reach.of_one_node(group)  # collectives reach all ranks
    reach, puts = find_reach(group, device, options.nodes), options.internode == "puts"
    if reach.is_one_node:
        if reach.rank == 0 and group.size() > 1:
            log.info("backend %s: %s: all ranks store into each other's memory", options.backend, reach.summary())
        return reach
    if puts:
        start_puts(group, device, options.wait_timeout_s)
    if reach.rank == 0:
        by = ("NCCL" if device.type == "cuda" else "gloo") + ", pooled rows by puts of NVSHMEM" * puts
        text = "backend %s: %s: stores within a node; between nodes one message a node and rank each way, by %s"
        log.warning(text, options.backend, reach.summary(), by)
    return reach


class ExchangeParts(NamedTuple):
    forward: Forward[Any]
    backward: Backward[Any]
    ids: IdExchange | None
    """None if TorchRec sends the ids"""
    local: LocalLookup[Any] | None
    """looks up the tables that every rank holds; None if TorchRec does"""
    arena: Arena | None
    """None if no part has windows"""

    def close(self) -> None:
        """Free the memory, with the last references to it; no rank may be in a step."""
        for part in (self.forward, self.backward, self.ids, self.arena):
            if part is not None:
                part.close()


ON_GPU = Platform(DeviceLookup, DeviceSignals, adds_sums=True)
ON_CPU = Platform(CpuLookup, CpuSignals, adds_sums=False)


def build_exchange(context: ExchangeContext) -> ExchangeParts:
    """Return the parts that the options name; a collective, which raises an InputError if it cannot make windows."""
    options, group, device = context.options, context.group, context.device
    on_gpu = device.type == "cuda"
    reach = context.reach or reach_of(options, group, device)
    platform, internode = ON_GPU if on_gpu else ON_CPU, None
    if not reach.is_one_node:
        internode = InternodeLayout(context.layout, reach, options.wire_dtype, platform.adds_sums)
    context = replace(context, reach=reach, internode=internode)

    # The memory: windows of every part in one arena.
    forward, backward = BACKENDS[options.backend].forward, BACKWARDS[options.resolved_backward]
    assert forward is not None, f"backend {options.backend} has no exchange of ours"
    make_forward, make_backward = forward.load(device.type), backward.load(device.type)
    specs = [make_forward.window_spec(context), make_backward.window_spec(context)]
    specs.append(context.ids.windows if context.ids is not None else None)
    regions: dict[str, Region] = {}
    for spec in specs:
        regions |= spec.regions(group.size()) if spec else {}
    if context.ids is not None:
        regions |= arrival_regions(context.ids.windows, reach)
    if internode is not None and (sums := internode.sum_windows(context.samples_per_rank)):
        regions |= sums.regions(group.size())
    arena = open_arena(regions, group, device, reach) if regions else None
    counters = context.counters.forward, context.counters.backward, context.counters.ids
    outputs, gradients, ids = (
        WindowPair(spec, arena, counter) if spec and arena else None
        for spec, counter in zip(specs, counters, strict=True)
    )

    # The parts.
    id_exchange: IdExchange | None = None
    if context.ids is not None:
        assert ids is not None
        id_exchange = (IdExchange if on_gpu else CpuIdExchange)(context, context.ids, ids)
    local: LocalLookup[Any] | None = None
    if context.layout.replicated:
        assert outputs is not None
        local = (DeviceLocalLookup if on_gpu else CpuLocalLookup)(context, outputs)
    made = make_forward(context, outputs, platform), make_backward(context, gradients)
    return ExchangeParts(*made, id_exchange, local, arena)
