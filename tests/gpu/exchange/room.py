"""The checks that need all ranks, or GPUs for themselves.

The others run on two ranks, and on GPUs that other checks use at the same time: they spend most of their time on the
CPU, to compile kernels and prepare.
"""

from tests.gpu.exchange.sharing import reason_for


def _by_name(names: dict[str, str]) -> dict[str, str]:
    """Return name -> reason, from the names of each reason."""
    return {name: why for why, each in names.items() for name in each.split()}


# Names of checks -> why two ranks do not test the same.
OF_ALL = _by_name(
    {
        "a rank has several peers, which it reaches in the schedule's order and which reach it in any": """
            dims_* schedules_* stress_pgas stress_fused stress_fused_stores update_sgd update_rowwise_adagrad
            update_deterministic update_overlaps update_yields update_stress dense_float32_* dense_bfloat16_*
            *owner_update_* collectives_* gemm_auto *gemm_copies gemm_tiles gemm_triggered gemm_delays_* losses_sgd
            collections_pgas collections_fused graph_losses_sgd_ranges graph_delays_* program_dlrm_main
            peer_stalls_training_* graph_peer_stalls
        """,
        "some ranks have no tables or no samples, and others have some": """
            sizes_* usage_frozen_tables_* foreign_normalised foreign_short_last_batch* foreign_empty_*
        """,
        "tables are cut over more than two ranks": """
            losses_columns losses_rows collections_rows_* *graph_rows_* foreign_longer_sequences
            *tensor_parallel_captured_fp32
        """,
        "nodes of one rank make no sums and forward nothing to their other ranks": """
            *unpooled_* lifetimes_nodes_* nodes_* same_streams_nodes_* peer_stalls_nodes_puts
        """,
    }
)

# Names of checks -> why they share their GPUs with no other.
EXCLUSIVE = _by_name(
    {
        "each of many steps would wait for its turn on the GPU": """
            stress_* nodes_stress_* nodes_puts_stress_* update_stress dense_float32_* dense_bfloat16_* gemm_delays_*
            owner_update_bits_* gathering_*
        """,
        "it measures, or needs, most of the GPU's memory": """
            memory_* update_memory update_large large_* many_bags_*
        """,
        "it measures times of the GPU": "update_overlaps update_yields",
    }
)


def why_all(name: str) -> str:
    """Return why a check needs all ranks, or an empty string."""
    return reason_for(name, OF_ALL)


def why_exclusive(name: str) -> str:
    """Return why a check shares its GPUs with no other, or an empty string."""
    return reason_for(name, EXCLUSIVE)
