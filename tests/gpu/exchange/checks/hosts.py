"""Exchanges between hosts, which are emulated: the same bits as where all ranks store to each other, and no overtaking.

Messages go from GPU to GPU of one machine, by NCCL or, where a check is named so, by puts of NVSHMEM: what is checked
is who sends what, where it is put, and when.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch

from dlrm_overlap.comm.network import NvshmemHeap, start_puts
from dlrm_overlap.comm.record import Record
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.kernels.messages import Groups, Incoming, Outgoing, Waiting, await_message, put_message
from tests.agreement import LOSS_TOLERANCE, WEIGHT_TOLERANCE, assert_all_near, assert_same
from tests.gpu.exchange.checks.backward import Training, tables_of_all_kinds, uneven_batches
from tests.gpu.exchange.checks.graphs import graph_config, train_in_segments
from tests.gpu.exchange.checks.stress import stress
from tests.gpu.exchange.checks.training import make_trainer, rows_of, small_config, train_steps
from tests.gpu.exchange.place import Check, Place

_BF16 = {"wire_dtype": torch.bfloat16, "output_dtype": torch.bfloat16, "leading_columns": 64}
_WAIT_S = 90.0  # a peer may still compile kernels that are linked with NVSHMEM, each for 4 to 7 s
_RUNS = {
    "pgas": (ExchangeOptions("pgas", wait_timeout_s=_WAIT_S), "adagrad"),
    "fused": (ExchangeOptions("fused", wait_timeout_s=_WAIT_S), "rowwise_adagrad"),
    "fused_stores_bf16": (ExchangeOptions("fused", put="stores", wait_timeout_s=_WAIT_S, **_BF16), "sgd"),  # type: ignore[arg-type]
    "pgas_bf16": (ExchangeOptions("pgas", wait_timeout_s=_WAIT_S, **_BF16), "adagrad"),  # type: ignore[arg-type]
}
# Bytes of a group: few rows that leave together, some, all of a run.
_GATHERED = {"none": 0, "16_kb": 16384, "whole": 1 << 30}
_STEPS = 20


def _between(options: ExchangeOptions, hosts: int, carrier: str) -> ExchangeOptions:
    return replace(options, hosts=hosts, between_hosts=carrier)


def _two(place: Place) -> int:
    """Return two hosts or, of an odd number of ranks, a host a rank."""
    return place.world_size if place.world_size % 2 else 2


def _rows_after(place: Place, optimizer: str, options: ExchangeOptions) -> dict[str, torch.Tensor]:
    """Return rows and states after a step a batch, by gradients that depend on the forward's output."""
    tables = tables_of_all_kinds(range(place.world_size - (place.world_size > 2)))  # the last of several has none
    training = Training(place, tables, optimizer, options)
    assert training.exchange.reach.whole == (options.hosts == 1 or place.world_size == 1)
    for seed, batch in enumerate(uneven_batches(place, tables)):
        training.step(batch, seed, feedback=True)
    rows = training.rows()
    training.close()
    return rows


def _check_bits(place: Place, options: ExchangeOptions, optimizer: str, carrier: str) -> None:
    expected = _rows_after(place, optimizer, replace(options, hosts=1))
    for hosts in sorted({_two(place), place.world_size}):
        found = _rows_after(place, optimizer, _between(options, hosts, carrier))
        assert_all_near(found, expected, 0.0, f"{hosts} hosts:")


def _check_stress(place: Place, options: ExchangeOptions, carrier: str) -> None:
    stress(place, _between(options, _two(place), carrier))


def _check_signals(place: Place) -> None:
    """A group's signal is set to the epoch, not added to, and its bytes are those that were staged, in any order."""
    assert not start_puts(place.group, place.device, 60.0)
    heap = NvshmemHeap(1 << 20, place.group, place.device)
    network, own, clock = heap.network, heap.local.data_ptr(), torch.zeros(1, dtype=torch.int64, device=place.device)
    groups, peer, source = Groups(24, 2), (place.rank + 1) % place.world_size, (place.rank - 1) % place.world_size
    out, arriving = Outgoing(own + 4096, 4096, own, peer), Incoming(own + 8192, own, source)
    waiting, words = Waiting(int(20e9), Record(place.device).status), heap.local.view(torch.int32)
    for epoch in (1, 2, 3):
        words[1024:1280] = torch.arange(256, device=place.device) + 1000 * place.rank + epoch
        put_message(network, out, 28, 32, groups, clock, epoch)
        await_message(network, arriving, 28, groups, waiting, clock, epoch)
        expected = torch.arange(224, dtype=torch.int32, device=place.device) + 1000 * source + epoch
        assert_same(words[2048 : 2048 + 224], expected, f"bytes of epoch {epoch}")
        assert heap.local.view(torch.int64)[:3].tolist() == [epoch, epoch, 0]
        place.meet()
    heap.close()


def _check_losses(place: Place, backend: str, carrier: str) -> None:
    """A run between hosts has the losses and the rows of one on one host, to the last bit."""
    runs = []
    for hosts in (1, _two(place)):
        config = small_config(place, backend, "adagrad")
        trainer = make_trainer(
            place, replace(config, embedding=replace(config.embedding, hosts=hosts, between_hosts=carrier))
        )
        runs.append((train_steps(place, trainer, 0, _STEPS), rows_of(trainer)))
        place.meet()
        trainer.close()
    (expected, expected_rows), (losses, rows) = runs
    assert losses == expected
    assert all(torch.equal(rows[key], expected_rows[key]) for key in expected_rows)


def _check_captured(place: Place, backend: str, known: bool, carrier: str, plan: Literal["auto", "row_wise"]) -> None:
    """Captured steps between hosts, under any delays and between evaluations, have the bits of those on one host.

    Where tables are cut by rows over all ranks, a host's sums are made first, in another order than on one host.
    """
    runs = []
    for hosts in (1, _two(place)):
        config = graph_config(place, backend, "rowwise_adagrad", known)
        # Between hosts, dense gradients are summed by a collective.
        train = replace(config.train, dense_reduce="collective")
        embedding = replace(config.embedding, hosts=hosts, between_hosts=carrier, plan=plan)
        config = replace(config, train=train, embedding=embedding)
        losses, evaluated, trainer = train_in_segments(place, config, delays=hosts > 1)
        runs.append((losses, evaluated, rows_of(trainer)))
        place.meet()
        trainer.close()
    (expected, expected_evaluated, expected_rows), (losses, evaluated, rows) = runs
    allowed = 0.0 if plan == "auto" else LOSS_TOLERANCE["rowwise_adagrad"]
    assert losses == pytest.approx(expected, rel=allowed, abs=0.0)
    assert evaluated == pytest.approx(expected_evaluated, rel=allowed, abs=0.0)
    assert_all_near(rows, expected_rows, 0.0 if plan == "auto" else WEIGHT_TOLERANCE["fp32"], "captured:")


def _checks(carrier: str) -> dict[str, Check]:
    """Return the checks of one carrier; those of puts hold only where NVSHMEM is."""
    prefix, gpu_only = {"messages": ("hosts", False), "puts": ("hosts_puts", True)}[carrier]
    checks = {
        f"captured_{backend}{'_known' * known}": partial(_check_captured, backend=backend, known=known, plan="auto")
        for backend, known in (("pgas", True), ("pgas", False), ("fused", True))
    }
    checks |= {f"stress_{name}": partial(_check_stress, options=_RUNS[name][0]) for name in ("pgas", "fused")}
    checks |= {
        f"bits_{name}": partial(_check_bits, options=options, optimizer=optimizer)
        for name, (options, optimizer) in _RUNS.items()
    }
    checks |= {f"losses_{backend}": partial(_check_losses, backend=backend) for backend in ("pgas", "fused")}
    if carrier == "puts":
        for name, size in _GATHERED.items():
            options = replace(_RUNS["pgas"][0], aggregate_bytes=size)
            checks[f"bits_gathered_{name}"] = partial(_check_bits, options=options, optimizer="sgd")
            checks[f"stress_gathered_{name}"] = partial(_check_stress, options=options)
    made = {
        f"{prefix}_{name}": Check(partial(check, carrier=carrier), timeout_s=200, gpu_only=gpu_only)
        for name, check in checks.items()
    }
    for backend in ("pgas", "fused"):  # TorchRec's planner cuts no table by rows on CPUs
        check = partial(_check_captured, backend=backend, known=False, carrier=carrier, plan="row_wise")
        made[f"{prefix}_sums_captured_{backend}"] = Check(check, timeout_s=200, gpu_only=True)
    return made


CHECKS = _checks("messages") | _checks("puts")
CHECKS["hosts_puts_signals"] = Check(_check_signals, timeout_s=200, gpu_only=True)
