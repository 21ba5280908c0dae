"""The registry of embedding backends; it imports neither their code nor torch (docs/adding_a_backend.md)."""

from importlib import import_module
from typing import Any, NamedTuple

_PACKAGE = "dlrm_overlap.embedding.backends"


class Implementation(NamedTuple):
    """The class of a forward or of a backward: MODULE:CLASS in `embedding/backends`."""

    name: str
    cpu: str | None = None
    """another class for CPUs"""

    def load(self, device_type: str) -> Any:
        module, _, name = (self.cpu if self.cpu and device_type == "cpu" else self.name).partition(":")
        return getattr(import_module(f"{_PACKAGE}.{module}"), name)


class Backend(NamedTuple):
    summary: str
    forward: Implementation | None
    """None: TorchRec's lookup and exchange"""
    backward: str | None
    """a key of `BACKWARDS`; None: TorchRec's"""
    stores_to_peers: bool = False
    """whether it stores into peers' memory within a node"""
    has_slices: bool = False
    """whether `embedding.put`, `slice_bags` and `programs_per_sm` apply"""


BACKENDS = {
    "torchrec": Backend("FBGEMM lookup, then an All-to-All of NCCL (gloo on CPU)", None, None),
    "nccl": Backend(
        "this project's lookup, then the same All-to-All",
        Implementation("collective:CollectiveForward"),
        "collective",
    ),
    "pgas": Backend(
        "pooled rows stored straight into the peers' memory",
        Implementation("pgas:ZeroCopyForward"),
        "push",
        stores_to_peers=True,
    ),
    "fused": Backend(
        "one persistent kernel that stores pooled rows directly, or copies slices when they are done",
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
"""backends whose exchange is this project's"""
