"""Checks once more, where streams are the same ones, and so is the memory that they allocate from.

PyTorch's pool has 32 streams of each priority, so a process with many models, or other users of the pool, gets some of
them twice. Memory that one stream allocates and another reads must not be reused before it was read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from tests.gpu.exchange.checks import (
    any_ids,
    backward_steps,
    gemm,
    graphs,
    nodes,
    owner_update,
    tensor_parallel,
    training,
    unpooled,
)
from tests.gpu.exchange.checks.graphs import graph_config, train_in_segments
from tests.gpu.exchange.place import Check, Place, every


@contextmanager
def _one_stream_of_each_priority() -> Iterator[None]:
    """Let a new stream be the first one of its priority; the current one has priority -1."""
    new, main = torch.cuda.Stream.__new__, torch.cuda.current_stream()
    known = {-1: main}

    def find(cls: type, device: Any = None, priority: int = 0, **existing: Any) -> torch.cuda.Stream:
        if existing:
            return new(cls, device, priority, **existing)
        if priority not in known:
            known[priority] = new(cls, device, priority)
        return known[priority]

    with patch.object(torch.cuda.Stream, "__new__", find):
        yield


def _check_bits(place: Place, backend: str, precision: str) -> None:
    """Steps have the same bits as with streams of their own."""
    config = graph_config(place, backend, "rowwise_adagrad", known=True)
    config = replace(config, train=replace(config.train, precision=precision))  # type: ignore[arg-type]
    expected = train_in_segments(place, config)
    with _one_stream_of_each_priority():
        train_in_segments(place, config).assert_same(expected, "with the same streams")


def _check_again(place: Place, check: Check) -> None:
    with _one_stream_of_each_priority():
        check.run(place)


_AGAIN = {
    name: check
    for names, module in (
        ("graph_rows_known graph_losses_dcn_bf16_fused", graphs),
        ("foreign_data_parallel_collection foreign_in_host_memory", graphs),
        ("any_ids_histories_fused_lru any_ids_cached_pgas_lru", any_ids),
        ("owner_update_training_dcn_adagrad", owner_update),
        ("window_input_dist_every_kind_of_sharding collections_weighted_pgas losses_graphed", training),
        ("update_parts", backward_steps),
        ("unpooled_mixed", unpooled),
        ("nodes_captured_pgas_known nodes_puts_captured_pgas", nodes),
        ("tensor_parallel_captured_fp32", tensor_parallel),
        ("gemm_copies", gemm),
    )
    for name, check in module.CHECKS.items()
    if name in names.split()
}
CHECKS = every("same_streams", _check_bits, backend=("pgas", "fused"), precision=("fp32", "bf16"), gpu_only=True) | {
    f"same_streams_{name}": replace(check, run=partial(_check_again, check=check), gpu_only=True)
    for name, check in _AGAIN.items()
}
