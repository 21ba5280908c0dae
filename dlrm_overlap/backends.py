"""The registry of embedding backends. It imports neither their code nor torch (docs/adding_a_backend.md)."""

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
    """What is known of a backend without importing its code."""

    summary: str
    """one line"""
    forward: Implementation | None
    """None: TorchRec's lookup and exchange"""
    backward: str | None
    """name in `BACKWARDS` of how gradients are sent back; None: TorchRec's"""
    stores_to_peers: bool = False
    """whether it stores into peers' memory within a node, which `GraphTrainPipeline` needs"""
    has_slices: bool = False
    """whether its kernel is persistent, so that `embedding.put`, `slice_bags` and `programs_per_sm` apply"""


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
"""Backends whose exchange is this project's."""
