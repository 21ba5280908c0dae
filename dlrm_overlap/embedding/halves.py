"""The two halves of an exchange, forward and backward, and the memory that both use."""

from typing import NamedTuple

from dlrm_overlap.backends import BACKENDS, BACKWARDS
from dlrm_overlap.comm.arena import Arena, Region, open_arena
from dlrm_overlap.embedding.backends.base import Backward, Forward
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.protocol.windows import WindowPair


class Halves(NamedTuple):
    """An open exchange."""

    forward: Forward
    backward: Backward
    arena: Arena | None
    """memory of every rank's windows and flags; None where neither half has windows"""

    def check(self) -> None:
        """Raise what a kernel has recorded; never waits for the device."""
        self.forward.check()
        self.backward.check()

    def close(self) -> None:
        """Give the memory back. Every rank must be through with its steps."""
        self.backward.close()
        self.forward.close()
        if self.arena is not None:
            self.arena.close()


def open_halves(context: ExchangeContext) -> Halves:
    """Make the halves of the backend and the backward that the options name, and their windows; a collective.

    Raises:
        InputError: if there is no room for the windows, or the ranks do not reach each other's memory.
    """
    options, device_type = context.options, context.device.type
    forward = BACKENDS[options.backend].forward
    assert forward is not None, f"backend {options.backend} has no exchange of ours"
    classes = forward.load(device_type), BACKWARDS[options.resolved_backward].load(device_type)
    specs = [half.window_spec(context) for half in classes]
    regions: dict[str, Region] = {}
    for spec in specs:
        regions |= spec.regions(context.group.size()) if spec else {}
    arena = open_arena(regions, context.group, context.device) if regions else None
    counters = context.counters.forward, context.counters.backward
    pairs = [
        WindowPair(spec, arena, counter) if spec and arena else None
        for spec, counter in zip(specs, counters, strict=True)
    ]
    forward_half, backward_half = (half(context, windows) for half, windows in zip(classes, pairs, strict=True))
    return Halves(forward_half, backward_half, arena)
