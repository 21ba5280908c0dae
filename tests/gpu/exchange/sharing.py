"""Ranks that share a GPU: how they are started, and which checks cannot run there.

They test addresses, flags, epochs, captures and replays of the same kernels, but not the order in which stores arrive
over a link. Times mean nothing: the GPU runs one rank at a time, for some milliseconds each.
"""

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

from dlrm_overlap.launching.launcher import World
from dlrm_overlap.launching.process_group import init_process_group

_OVERLAP = "ranks that take turns on a GPU do not show what runs at the same time"
_CAPTURED = "its graphs hold the group's collectives: NCCL takes one rank a GPU, and gloo's cannot be captured"
_NVSHMEM = "NVSHMEM between ranks of one GPU is not supported here"
UNSHARED = {  # names of checks -> why they cannot run where ranks share a GPU
    "large_windows_*": "the windows of two ranks, of 32 GiB each, do not fit in 80 GB",
    "update_overlaps": _OVERLAP,
    "update_yields": _OVERLAP,
    "*tensor_parallel_captured_*": _CAPTURED,
    "tensor_parallel_delayed_*": _CAPTURED,
    "*nodes_captured_*": _CAPTURED,
    "nodes_sums_captured_*": _CAPTURED,
    "lifetimes_nodes_messages": _CAPTURED,
    "lifetimes_nodes_puts": _NVSHMEM,
    "*nodes_puts_*": _NVSHMEM,
    "peer_stalls_nodes_puts": _NVSHMEM,
}


def reason_for(name: str, reasons: Mapping[str, str]) -> str:
    """Return the reason of the first pattern that matches the name of a check, or an empty string."""
    return next((why for pattern, why in reasons.items() if fnmatchcase(name, pattern)), "")


def why_not_shared(name: str) -> str:
    """Return why check `name` cannot run where ranks share a GPU, or an empty string."""
    return reason_for(name, UNSHARED)


def init_shared(world: World, device: torch.device, timeout_s: float) -> None:
    """Initialize the process group of a rank that shares `device`, with gloo also for GPU tensors."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # a multicast takes a GPU only once
    init_process_group(world, torch.device("cpu"), timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))
