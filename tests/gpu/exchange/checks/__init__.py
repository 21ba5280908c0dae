"""All checks, in the order in which they run."""

from tests.gpu.exchange.checks import (
    any_ids,
    backward,
    backward_steps,
    captured_nccl,
    collectives,
    deltas,
    dense,
    faults,
    gathering,
    gemm,
    graphs,
    lifetimes,
    lookups,
    nodes,
    overlap,
    owner_update,
    same_streams,
    streams,
    stress,
    tensor_parallel,
    training,
    unpooled,
    windows,
)

_MODULES = (
    *(lookups, windows, stress, streams, backward, backward_steps, overlap, faults, dense, collectives, gathering),
    *(
        owner_update,
        gemm,
        training,
        graphs,
        unpooled,
        lifetimes,
        tensor_parallel,
        nodes,
        captured_nccl,
        any_ids,
        deltas,
        same_streams,
    ),
)
CHECKS = {name: check for module in _MODULES for name, check in module.CHECKS.items()}
CHECKS |= faults.LOST_PEERS | backward_steps.LOST_PEERS | dense.LOST | owner_update.LOST | gemm.LOST | graphs.LOST
