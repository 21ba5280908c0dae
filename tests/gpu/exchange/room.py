"""The checks that need all ranks, or GPUs for themselves.

The others run on two ranks, and on GPUs that other checks use at the same time: they spend most of their time on the
CPU, to compile kernels and prepare.
"""

from tests.gpu.exchange.sharing import reason_for

_PEERS = "a rank has several peers, which it reaches in the schedule's order and which reach it in any"
_NODES = "nodes of one rank make no sums and forward nothing to their other ranks"
_CUTS = "tables are cut over more than two ranks"
_EMPTY = "some ranks have no tables or no samples, and others have some"
OF_ALL = {  # names of checks -> why two ranks do not test the same
    "dims_*": _PEERS,
    "schedules_*": _PEERS,
    "sizes_*": _EMPTY,
    "stress_pgas": _PEERS,
    "stress_fused": _PEERS,
    "stress_fused_stores": _PEERS,
    "update_sgd": _PEERS,
    "update_rowwise_adagrad": _PEERS,
    "update_deterministic": _PEERS,
    "update_overlaps": _PEERS,
    "update_yields": _PEERS,
    "update_stress": _PEERS,
    "dense_float32_*": _PEERS,
    "dense_bfloat16_*": _PEERS,
    "collectives_*": _PEERS,
    "gemm_auto": _PEERS,
    "gemm_copies": _PEERS,
    "gemm_tiles": _PEERS,
    "gemm_triggered": _PEERS,
    "gemm_delays_*": _PEERS,
    "losses_sgd": _PEERS,
    "losses_columns": _CUTS,
    "losses_rows": _CUTS,
    "collections_pgas": _PEERS,
    "collections_fused": _PEERS,
    "collections_rows_*": _CUTS,
    "graph_losses_sgd_ranges": _PEERS,
    "graph_rows_*": _CUTS,
    "graph_delays_*": _PEERS,
    "usage_frozen_tables_*": _EMPTY,
    "program_dlrm_main": _PEERS,
    "foreign_normalised": _EMPTY,
    "foreign_short_last_batch*": _EMPTY,
    "foreign_empty_*": _EMPTY,
    "foreign_longer_sequences": _CUTS,
    "unpooled_*": _NODES,
    "lifetimes_nodes_*": _NODES,
    "tensor_parallel_captured_fp32": _CUTS,
    "nodes_*": _NODES,
    "peer_stalls_training_*": _PEERS,
    "peer_stalls_nodes_puts": _NODES,
    "graph_peer_stalls": _PEERS,
}

_STEPS = "each of many steps would wait for its turn on the GPU"
_BYTES = "it measures, or needs, most of the GPU's memory"
_TIMES = "it measures times of the GPU"
EXCLUSIVE = {  # names of checks -> why they share their GPUs with no other
    "stress_*": _STEPS,
    "nodes_stress_*": _STEPS,
    "nodes_puts_stress_*": _STEPS,
    "update_stress": _STEPS,
    "dense_float32_*": _STEPS,
    "dense_bfloat16_*": _STEPS,
    "gemm_delays_*": _STEPS,
    "gathering_*": _STEPS,
    "memory_*": _BYTES,
    "update_memory": _BYTES,
    "update_large": _BYTES,
    "large_*": _BYTES,
    "many_bags_*": _BYTES,
    "update_overlaps": _TIMES,
    "update_yields": _TIMES,
}


def why_all(name: str) -> str:
    """Return why a check needs all ranks, or an empty string."""
    return reason_for(name, OF_ALL)


def why_exclusive(name: str) -> str:
    """Return why a check shares its GPUs with no other, or an empty string."""
    return reason_for(name, EXCLUSIVE)
