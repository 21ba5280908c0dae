"""The registry: every backend of the embedding stage, its options, and where its code is.

Configuration, command line, sharder and benchmarks read their lists here. It loads no code of a backend before that is
asked for, and no torch. docs/adding_a_backend.md says how to add one.
"""

from importlib import import_module
from typing import Any, NamedTuple

_PACKAGE = "dlrm_overlap.embedding.backends"


class Implementation(NamedTuple):
    """Where the class of a forward or of a backward is, MODULE:CLASS in `embedding/backends`, by type of device."""

    cpu: str
    cuda: str

    def load(self, device_type: str) -> Any:
        """Import and return the class for `device_type`, cpu or cuda."""
        module, _, name = getattr(self, device_type).partition(":")
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
    forward_across: Implementation | None = None
    """the forward where ranks are on several nodes; None takes the same, as a collective reaches all ranks"""


BACKENDS = {
    "torchrec": Backend("FBGEMM lookup, then an All-to-All of NCCL (gloo on CPU)", None, None),
    "nccl": Backend(
        "our lookup, then the same",
        Implementation(cpu="collective:CpuCollectiveForward", cuda="collective:CollectiveForward"),
        "collective",
    ),
    "pgas": Backend(
        "pooled rows stored straight into the peers' memory",
        Implementation(cpu="cpu:CpuZeroCopyForward", cuda="pgas:ZeroCopyForward"),
        "push",
        stores_to_peers=True,
        forward_across=Implementation(cpu="internode:CpuZeroCopyAcross", cuda="internode:ZeroCopyAcross"),
    ),
    "fused": Backend(
        "one persistent kernel that stores pooled rows in place, or puts slices as they are done",
        Implementation(cpu="cpu:CpuZeroCopyForward", cuda="fused:SlicedForward"),
        "push",
        stores_to_peers=True,
        has_slices=True,
        forward_across=Implementation(cpu="internode:CpuZeroCopyAcross", cuda="internode:SlicedAcross"),
    ),
}

BACKWARDS = {
    "collective": Implementation(cpu="collective:CollectiveBackward", cuda="collective:CollectiveBackward"),
    "push": Implementation(cpu="cpu:CpuPush", cuda="push:Push"),
}

BACKWARDS_ACROSS = BACKWARDS | {"push": Implementation(cpu="internode:CpuPushAcross", cuda="internode:PushAcross")}
"""The backwards where ranks are on several nodes."""

EXCHANGED = tuple(name for name, backend in BACKENDS.items() if backend.forward is not None)
"""The backends whose exchange is ours: what the sharder takes."""
