"""The parts of an exchange, forward, backward and that of the ids, and the memory that they use."""

from dataclasses import replace
from typing import NamedTuple

from dlrm_overlap.backends import BACKENDS, BACKWARDS, BACKWARDS_ACROSS
from dlrm_overlap.comm.arena import Arena, Region, open_arena
from dlrm_overlap.comm.network import agree_on_puts
from dlrm_overlap.comm.reach import find_reach
from dlrm_overlap.embedding.backends.base import Backward, Forward
from dlrm_overlap.embedding.backends.ids import DeviceIdExchange, HostIdExchange, IdExchange
from dlrm_overlap.embedding.backends.local import DeviceLocalLookup, HostLocalLookup, LocalLookup
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.protocol.crossing import arrival_regions
from dlrm_overlap.embedding.protocol.windows import WindowPair


class Halves(NamedTuple):
    """An open exchange."""

    forward: Forward
    backward: Backward
    ids: IdExchange | None
    """brings ids to the owners of their rows, where that is not left to TorchRec"""
    local: LocalLookup | None
    """looks up the tables that every rank holds, where that is not left to TorchRec"""
    arena: Arena | None
    """memory of every rank's windows and flags; None where no part has windows"""

    def check(self) -> None:
        """Raise what a kernel has recorded; never waits for the device."""
        if self.ids is not None:
            self.ids.check()
        self.forward.check()
        self.backward.check()

    def close(self) -> None:
        """Give the memory back. Every rank must be through with its steps."""
        self.backward.close()
        self.forward.close()
        if self.local is not None:
            self.local.close()
        if self.ids is not None:
            self.ids.close()
        if self.arena is not None:
            self.arena.close()


def open_halves(context: ExchangeContext) -> Halves:
    """Make the halves of the backend and the backward that the options name, the ids' exchange, and their windows.

    A collective.

    Raises:
        InputError: if there is no room for the windows, or the ranks do not reach each other's memory.
    """
    options, device_type = context.options, context.device.type
    reach = context.reach or find_reach(context.group, context.device, options.hosts)
    puts = context.puts
    if puts is None:
        puts, _ = agree_on_puts(options.between_hosts, reach, context.group, context.device, options.wait_timeout_s)
    context = replace(context, reach=reach, puts=puts)
    forward = BACKENDS[options.backend].forward_for(options.resolved_put, reach.whole)
    assert forward is not None, f"backend {options.backend} has no exchange of ours"
    backwards = BACKWARDS if reach.whole else BACKWARDS_ACROSS
    classes = forward.load(device_type), backwards[options.resolved_backward].load(device_type)
    specs = [half.window_spec(context) for half in classes]
    specs.append(context.ids.windows if context.ids is not None else None)
    regions: dict[str, Region] = {}
    for spec in specs:
        regions |= spec.regions(context.group.size()) if spec else {}
    if context.ids is not None:
        regions |= arrival_regions(context.ids.windows, reach)
    arena = open_arena(regions, context.group, context.device, reach) if regions else None
    counters = context.counters.forward, context.counters.backward, context.counters.ids
    pairs = [
        WindowPair(spec, arena, counter) if spec and arena else None
        for spec, counter in zip(specs, counters, strict=True)
    ]
    forward_windows, backward_windows, id_windows = pairs
    ids: IdExchange | None = None
    if context.ids is not None:
        assert id_windows is not None
        ids = (DeviceIdExchange if device_type == "cuda" else HostIdExchange)(context, context.ids, id_windows)
    local: LocalLookup | None = None
    if context.layout.replicated:
        assert forward_windows is not None
        local = (DeviceLocalLookup if device_type == "cuda" else HostLocalLookup)(context, forward_windows)
    return Halves(classes[0](context, forward_windows), classes[1](context, backward_windows), ids, local, arena)
