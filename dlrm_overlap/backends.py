"""The registry of all backends, without torch: their code is imported when it is used.

docs/adding_a_backend.md says how to add one.
"""

from importlib import import_module
from typing import Any, NamedTuple

_PACKAGE = "dlrm_overlap.embedding.backends"


class Implementation(NamedTuple):
    """Where the class of a forward or of a backward is: MODULE:CLASS in `embedding/backends`."""

    name: str
    cpu: str | None = None
    """another class for CPUs"""

    def load(self, device_type: str) -> Any:
        """Import and return the class for `device_type`, cpu or cuda."""
        module, _, name = (self.cpu if self.cpu and device_type == "cpu" else self.name).partition(":")
        return getattr(import_module(f"{_PACKAGE}.{module}"), name)


class Backend(NamedTuple):
    """The facts of a backend, known before any of its code is loaded."""

    summary: str
    """in a line"""
    forward: Implementation | None
    """None: TorchRec's own lookup and exchange"""
    backward: str | None
    """the one of `BACKWARDS` by which gradients return; None: TorchRec's own"""
    stores_to_peers: bool = False
    """it stores into the peers' memory, within a node or NVLink domain; there `GraphTrainPipeline` captures its steps.
    Between nodes it sends messages"""
    has_slices: bool = False
    """its kernel is persistent: `embedding.put`, `slice_bags` and `programs_per_sm` have an effect"""


BACKENDS = {
    "torchrec": Backend("FBGEMM lookup, then an All-to-All of NCCL (gloo on CPU)", None, None),
    "nccl": Backend("our lookup, then the same", Implementation("collective:CollectiveForward"), "collective"),
    "pgas": Backend(
        "pooled rows stored straight into the peers' memory",
        Implementation("pgas:ZeroCopyForward"),
        "push",
        stores_to_peers=True,
    ),
    "fused": Backend(
        "one persistent kernel that stores pooled rows in place, or puts slices as they are done",
        Implementation("fused:SlicedForward", cpu="pgas:ZeroCopyForward"),
        "push",
        stores_to_peers=True,
        has_slices=True,
    ),
}

BACKWARDS = {
    "collective": Implementation("collective:CollectiveBackward"),
    "push": Implementation("push:Push", cpu="cpu:CpuPush"),
}

EXCHANGED = tuple(name for name, backend in BACKENDS.items() if backend.forward is not None)
"""The backends whose exchange is ours: what the sharder takes."""
