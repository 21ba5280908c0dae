"""Exchanges between emulated nodes: the same bits as on one node, and no step overtakes another.

Messages go between GPUs of one machine, by NCCL or, in checks of that name, by NVSHMEM's puts. They test who sends
what, where it is put, and when.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.comm.network import NvshmemHeap, start_puts
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.kernels.messages import Groups, Outgoing, Waiting, send_signal, wait_message
from tests.agreement import LOSS_TOLERANCE, assert_all_near
from tests.gpu.exchange.checks.backward import DIMS, FEW_DIMS, Training, tables_of_all_kinds, uneven_batches
from tests.gpu.exchange.checks.graphs import graph_config, train_in_segments
from tests.gpu.exchange.checks.stress import stress
from tests.gpu.exchange.checks.training import assert_rows_agree, small_config
from tests.gpu.exchange.place import Check, Place, every

_BF16 = {"wire_dtype": torch.bfloat16, "output_dtype": torch.bfloat16, "leading_columns": 64}
_WAIT_S = 90.0  # a peer may be compiling kernels that are linked with NVSHMEM, each for 4 to 7 s
_RUNS = {
    "pgas": (ExchangeOptions("pgas", wait_timeout_s=_WAIT_S), "adagrad"),
    "fused": (ExchangeOptions("fused", wait_timeout_s=_WAIT_S), "rowwise_adagrad"),
    "fused_stores_bf16": (ExchangeOptions("fused", put="staged", wait_timeout_s=_WAIT_S, **_BF16), "sgd"),  # type: ignore[arg-type]
    "pgas_bf16": (ExchangeOptions("pgas", wait_timeout_s=_WAIT_S, **_BF16), "adagrad"),  # type: ignore[arg-type]
}
# Bytes of a group: of one row, of some rows, of all rows of a run.
_GATHERED = {"none": 0, "16_kb": 16384, "whole": 1 << 30}
_STEPS = 20
_SUMS_TOLERANCE = 1e-4  # of rows after 40 steps of row-wise Adagrad with partial sums in another order


def _between(options: ExchangeOptions, nodes: int, carrier: str) -> ExchangeOptions:
    return replace(options, nodes=nodes, internode=carrier)


def _two(place: Place) -> int:
    """Return 2, or a node for each rank if the number of ranks is odd."""
    return place.world_size if place.world_size % 2 else 2


def _rows_after(place: Place, optimizer: str, options: ExchangeOptions, dims: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return rows and states after a step for each batch, whose gradients depend on the forward's output."""
    tables = tables_of_all_kinds(range(place.world_size - (place.world_size > 2)), dims)  # the last of several has none
    training = Training(place, tables, optimizer, options)
    assert training.exchange.reach.is_one_node == (options.nodes == 1 or place.world_size == 1)
    for seed, batch in enumerate(uneven_batches(place, tables)):
        training.step(batch, seed, feedback=True)
    rows = training.rows()
    training.close()
    return rows


def _check_bits(place: Place, run: tuple[ExchangeOptions, str], carrier: str, dims: Sequence[int] = FEW_DIMS) -> None:
    options, optimizer = run
    expected = _rows_after(place, optimizer, replace(options, nodes=1), dims)
    for nodes in sorted({_two(place), place.world_size}):
        found = _rows_after(place, optimizer, _between(options, nodes, carrier), dims)
        assert_all_near(found, expected, 0.0, f"{nodes} nodes:")


def _check_stress(place: Place, options: ExchangeOptions, carrier: str) -> None:
    stress(place, _between(options, _two(place), carrier))


def _check_signals(place: Place) -> None:
    """A signal is set to the epoch, not added to."""
    start_puts(place.group, place.device, 60.0)
    heap = NvshmemHeap(1 << 20, place.group, place.device)
    network, own, clock = heap.network, heap.local.data_ptr(), torch.zeros(1, dtype=torch.int64, device=place.device)
    out, source = Outgoing(0, own, (place.rank + 1) % place.world_size), (place.rank - 1) % place.world_size
    waiting = Waiting(int(20e9), DeviceErrorRecord(place.device).status)
    one_row = torch.tensor([0, 1], device=place.device).int()
    for epoch in (1, 2, 3):
        send_signal(network, out, clock, epoch)
        wait_message(network, source, own, Groups(1, 1), waiting, clock, epoch, one_row)
        assert heap.local.view(torch.int64)[:2].tolist() == [epoch, 0]
        place.meet()
    heap.close()


def _check_losses(place: Place, backend: str, carrier: str) -> None:
    """A run between nodes has the losses and the rows of a run on one node, to the last bit."""
    config = small_config(place, backend, "adagrad")
    apart = replace(config.embedding, nodes=_two(place), internode=carrier)
    both = [replace(config, embedding=each) for each in (replace(apart, nodes=1), apart)]
    expected, found = (train_in_segments(place, each, borders=(0, _STEPS)) for each in both)
    found.assert_same(expected, "between nodes")


def _check_captured(place: Place, backend: str, known: bool, carrier: str, plan: Literal["auto", "row_wise"]) -> None:
    """Captured steps between nodes, under delays and between evaluations, have the bits of steps on one node.

    If tables are cut by rows over all ranks, each node sums first, in another order than on one node.
    """
    config = graph_config(place, backend, "rowwise_adagrad", known)
    # Between nodes, dense gradients are summed by a collective.
    config = replace(config, train=replace(config.train, dense_reduce="collective"))
    apart = replace(config.embedding, nodes=_two(place), internode=carrier, plan=plan)
    expected = train_in_segments(place, replace(config, embedding=replace(apart, nodes=1)))
    found = train_in_segments(place, replace(config, embedding=apart), delays=True)
    if plan == "auto":
        found.assert_same(expected, "captured")
    else:
        found.assert_near(expected, LOSS_TOLERANCE["rowwise_adagrad"], "captured")
        assert_rows_agree(found.rows, expected.rows, expected.before, "captured", _SUMS_TOLERANCE)


def _add(carrier: str, name: str, check: Callable[..., None], gpu_only: bool = False, **axes: Any) -> dict[str, Check]:
    """Return the checks of a carrier; puts need NVSHMEM."""
    prefix = {"messages": "nodes", "puts": "nodes_puts"}[carrier]
    gpu_only = gpu_only or carrier == "puts"
    return every(f"{prefix}_{name}", partial(check, carrier=carrier), timeout_s=120, gpu_only=gpu_only, **axes)


_messages, _puts = partial(_add, "messages"), partial(_add, "puts")
_ranges, _known = (partial(_check_captured, plan="auto", known=known) for known in (False, True))
# TorchRec's planner cuts no table by rows on CPUs.
_sums = partial(_check_captured, plan="row_wise", known=False)
_stressed = {name: _RUNS[name][0] for name in ("pgas", "fused")}
_gathered = {name: replace(_RUNS["pgas"][0], aggregate_bytes=size) for name, size in _GATHERED.items()}
# Both carriers send the same messages in the same steps. Puts are tested where they differ: kernels that put, groups of
# rows, signals, and captures.
CHECKS = (
    _messages("captured", _known, backend={"pgas_known": "pgas", "fused_known": "fused"})
    | _messages("captured", _ranges, backend=["pgas"])
    | _messages("stress", _check_stress, options=_stressed)
    | _messages("bits", _check_bits, run={name: run for name, run in _RUNS.items() if name != "pgas"})
    | _messages("bits", partial(_check_bits, dims=DIMS), run={"pgas_all_dims": _RUNS["pgas"]})
    | _messages("losses", _check_losses, backend=["pgas"])
    | _messages("sums_captured", _sums, gpu_only=True, backend=("pgas", "fused"))
    | _puts("captured", _known, backend={"pgas_known": "pgas"})
    | _puts("captured", _ranges, backend=["pgas"])
    | _puts("stress", _check_stress, options=_stressed)
    | _puts("stress_gathered", _check_stress, options={"16_kb": _gathered["16_kb"]})
    | _puts("bits", _check_bits, run={name: _RUNS[name] for name in ("fused", "fused_stores_bf16")})
    | _puts("bits_gathered", _check_bits, run={name: (each, "sgd") for name, each in _gathered.items()})
    | _puts("sums_captured", _sums, backend=["pgas"])
    | every("nodes_puts_signals", _check_signals, timeout_s=120, gpu_only=True)
)
