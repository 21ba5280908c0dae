"""All checks, in the order in which they run."""

from tests.gpu.exchange.checks import (
    backward,
    backward_steps,
    collectives,
    dense,
    faults,
    gathering,
    gemm,
    graphs,
    lifetimes,
    lookups,
    nodes,
    overlap,
    streams,
    stress,
    tensor_parallel,
    training,
    unpooled,
    windows,
)

CHECKS = (
    lookups.CHECKS
    | windows.CHECKS
    | stress.CHECKS
    | streams.CHECKS
    | backward.CHECKS
    | backward_steps.CHECKS
    | overlap.CHECKS
    | faults.CHECKS
    | dense.CHECKS
    | collectives.CHECKS
    | gathering.CHECKS
    | gemm.CHECKS
    | training.CHECKS
    | graphs.CHECKS
    | unpooled.CHECKS
    | lifetimes.CHECKS
    | tensor_parallel.CHECKS
    | nodes.CHECKS
    | faults.LOST_PEERS
    | backward_steps.LOST_PEERS
    | dense.LOST
    | gemm.LOST
    | graphs.LOST
)
