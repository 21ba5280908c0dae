"""Ranks that share a GPU: how they are started, and which checks cannot hold there.

They test addresses, flags, epochs, captures and replays of the very kernels. Not tested is the order in which stores
arrive over a link, and nothing that is timed counts: the GPU runs one rank at a time, for some milliseconds each.
"""

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

from dlrm_overlap.launching.launcher import World
from dlrm_overlap.launching.process_group import init_process_group

_BESIDE = "ranks that take turns on a GPU do not show what runs beside what"
_CAPTURED = "its graphs hold the group's collectives: NCCL takes one rank a GPU, and gloo's cannot be captured"
_NVSHMEM = "NVSHMEM between ranks of one GPU is not tried"
UNSHARED = {
    "large_windows_*": "80 GB have no room for the windows of two ranks, of 32 GiB each",
    "update_overlaps": _BESIDE,
    "update_yields": _BESIDE,
    "tensor_parallel_captured_*": _CAPTURED,
    "tensor_parallel_delayed_*": _CAPTURED,
    "nodes_captured_*": _CAPTURED,
    "nodes_sums_captured_*": _CAPTURED,
    "lifetimes_nodes_messages": _CAPTURED,
    "lifetimes_nodes_puts": _NVSHMEM,
    "nodes_puts_*": _NVSHMEM,
    "peer_stalls_nodes_puts": _NVSHMEM,
}
"""names of checks -> why they cannot hold where ranks share a GPU"""


def reason_for(name: str, reasons: Mapping[str, str]) -> str:
    """Return the reason of the first pattern that matches the name of a check; empty if none does."""
    return next((why for pattern, why in reasons.items() if fnmatchcase(name, pattern)), "")


def why_not_shared(name: str) -> str:
    """Return why check `name` cannot hold where ranks share a GPU; empty if it can."""
    return reason_for(name, UNSHARED)


def init_shared(world: World, device: torch.device, timeout_s: float) -> None:
    """Do what `init_process_group` does for a rank that shares `device`, with gloo for the GPU's tensors, too."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # a multicast takes a GPU once
    init_process_group(world, torch.device("cpu"), timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))
