"""Exchanges between emulated nodes: the same bits as if all ranks store to each other."""

import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.arena import open_arena
from dlrm_overlap.comm.device_errors import ExchangeTimeoutError
from dlrm_overlap.comm.every_rank import gathered
from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.embedding import gradient_layout, plan
from dlrm_overlap.embedding.backends.ids import CpuIdExchange, IdExchange
from dlrm_overlap.embedding.backends.lookup import DeviceLookup
from dlrm_overlap.embedding.backends.messages import ByCollective
from dlrm_overlap.embedding.configured_sharders import build_sharders
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.id_layout import BatchCapacity, IdLayout, joined
from dlrm_overlap.embedding.internode import Messages, arrival_regions
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions, StepCounters
from dlrm_overlap.embedding.plan import build_topology, make_plan
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels import launches
from dlrm_overlap.kernels.bags import Windows
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.launches import launches_of
from dlrm_overlap.train.model import build_model
from tests.agreement import LOSS_TOLERANCE, WEIGHT_TOLERANCE, assert_all_near, assert_near, assert_same
from tests.distributed.captured import captures
from tests.distributed.interpreted import interpreted_parts, without_streams
from tests.distributed.models import world
from tests.distributed.tiny_stage import CPU, ROWS, Stage
from tests.distributed.workers import cases_on_ranks, make_trainer, quickstart

OWNERS = [([8, 4], [4]), ([], []), ([8], [12]), ([4], [])]  # rank 1 holds no tables
CUT = [(8, (0, 1)), (4, (2, 3))]
"""tables cut by rows, each on the ranks of one node, so that sums have the bits of a single node's"""
BATCH_SIZES = [(3, 2, 4, 1), (1, 1, 1, 1), (9, 2, 5, 3), (2, 7, 0, 4), (0, 0, 3, 0), (0, 0, 0, 0), (3, 2, 4, 1)]
NODES = {
    "2 of 2": (range(2), range(2, 4)),
    "4 of 1": tuple(range(rank, rank + 1) for rank in range(4)),
    "3 and 1": (range(3), range(3, 4)),  # rank 3 takes three ranks' messages
    "1 and 3": (range(1), range(1, 4)),
}
WIRES: Sequence[dict[str, Any]] = [
    {},
    {"wire_dtype": torch.float16},
    {"wire_dtype": torch.bfloat16, "output_dtype": torch.bfloat16, "leading_columns": 8},
]


def _exchange(stage: Stage, nodes: str, backend: str, **options: Any) -> Exchange:
    exchange = stage.exchange(world(), backend, **options)
    exchange.reach = Reach(stage.rank, NODES[nodes], "emulated")
    return exchange


def _train(rank: int, exchange: Exchange, stage: Stage) -> list[torch.Tensor]:
    """Return the outputs of a step for each of the batch sizes, all but one of which are trained on."""
    generator, outputs = torch.Generator().manual_seed(rank), []
    for number, sizes in enumerate(BATCH_SIZES):
        inputs, _ = stage.inputs(number, sizes)
        with torch.set_grad_enabled(number != 1):
            pooled = exchange.start(inputs, sizes).wait()
        outputs.append(pooled.detach().clone())
        gradient = torch.randn(pooled.shape, generator=generator).to(pooled.dtype)
        if pooled.requires_grad:
            pooled.backward(gradient)
        if rank == 2:
            time.sleep(0.02)  # nobody may overtake it
        del pooled
    return outputs


def check_bits_are_those_of_one_node(rank: int) -> None:
    every = ["pgas", "fused"]
    ways = [(EmbOptimType.EXACT_ADAGRAD, WIRES[0], NODES, every), (EmbOptimType.EXACT_SGD, WIRES[1], ["2 of 2"], every)]
    ways += [(EmbOptimType.EXACT_SGD, WIRES[2], ["1 and 3"], ["fused"])]
    for optimizer, more, splits, backends in ways:
        with patch.object(gradient_layout, "_PART_BYTES", 64):
            known = Stage(OWNERS, rank, optimizer=optimizer, cut=CUT)
            exchange = known.exchange(world(), "pgas", nodes=1, **more)
            expected = _train(rank, exchange, known)
            assert exchange.reach.is_one_node
            for nodes, backend in ((nodes, backend) for nodes in splits for backend in backends):
                stage, what = Stage(OWNERS, rank, optimizer=optimizer, cut=CUT), f"{backend}, {nodes}, {more}"
                exchange = _exchange(stage, nodes, backend, **more)
                for number, pooled in enumerate(_train(rank, exchange, stage)):
                    assert_same(pooled, expected[number], f"{what}, step {number}")
                assert_all_near(stage.rows_and_states(), known.rows_and_states(), 0.0, f"{what}:")
                exchange.close()


def check_nodes_are_found_and_emulated(rank: int) -> None:
    stage = Stage(OWNERS, rank)
    assert stage.exchange(world(), "pgas").reach.nodes == (range(4),), "one machine"
    assert stage.exchange(world(), "pgas", nodes=2).reach.nodes == NODES["2 of 2"]
    assert stage.exchange(world(), "nccl", nodes=2).reach.is_one_node, "a collective reaches all"


def check_machines_of_different_sizes_get_one_plan(rank: int) -> None:
    config = quickstart(Path("unused"), "run")
    module = build_model(config.model, config.embedding, [4000, 50, 20, 10], 13, seed=0)
    sharders, pooling = build_sharders(config.embedding, "fp32", 0), [40.0, 2.0, 3.0, 4.0]
    for sizes, kind in (((1, 1, 2, 2), "row_wise"), ((2, 2, 2, 2), "table_row_wise")):
        topology = build_topology(CPU, len(sizes), sizes[rank])
        with patch.object(plan, "find_nodes", lambda *_: (NODES["2 of 2"], "machines")):
            made = make_plan(module, sharders, topology, config.embedding, pooling, 8, world())
        tables: Any = made.plan["embedding"]
        assert tables["t_00"].sharding_type == kind
        found = {name: (table.sharding_type, table.ranks) for name, table in tables.items()}
        assert gathered(found, world()) == [found] * len(sizes)


def check_a_rank_that_does_not_step_is_named(rank: int) -> None:
    stage, sizes = Stage(OWNERS, rank), (4, 4, 4, 4)
    exchange = stage.exchange(world(), "pgas", nodes=2, wait_timeout_s=1.0)
    inputs, _ = stage.inputs(0, sizes)
    exchange.start(inputs, sizes).wait()
    forward: Any = exchange._open().forward
    told = pytest.raises(ExchangeTimeoutError, match=r"of rank [0-3]: expected epoch 2, seen 1;")
    # Messages stay where they have arrived.
    with patch.object(forward.transport, "_pass_on", lambda *_: None), told as raised:
        exchange.start(inputs, sizes).wait()
    silent = (2, 3) if rank < 2 else (0, 1)
    assert any(f"of rank {peer}:" in str(raised.value) for peer in silent), "a rank of the other node"


class _Work:
    """A collective that notes whether it is waited for."""

    def __init__(self, work: Any) -> None:
        self._work, self.waited = work, False

    def wait(self) -> None:
        self._work.wait()
        self.waited = True


def check_the_gpus_parts_under_the_interpreter(rank: int) -> None:
    under_way, exchange_ = list[_Work](), ByCollective.exchange

    def begin(carrier: ByCollective, messages: Messages) -> _Work:
        under_way.append(_Work(exchange_(carrier, messages)))
        return under_way[-1]

    noted = "exchange", begin
    half: dict[str, Any] = {"wire_dtype": torch.float16, "output_dtype": torch.float16, "leading_columns": 8}
    ways = [
        ("pgas", EmbOptimType.EXACT_ADAGRAD, half, "2 of 2", "messages"),
        ("fused", EmbOptimType.EXACT_SGD, {}, "1 and 3", "messages"),  # two receive no gradients
        ("fused", EmbOptimType.EXACT_ADAGRAD, half, "3 and 1", "puts"),
        ("pgas", EmbOptimType.EXACT_SGD, {"aggregate_bytes": 512}, "4 of 1", "puts"),  # one has no tables
    ]
    for backend, optimizer, more, nodes, by in ways:
        stage, known = (Stage(OWNERS, rank, optimizer=optimizer, cut=CUT) for _ in range(2))
        under_way.clear()
        exchange, generator = known.exchange(world(), "pgas", nodes=1, **more), torch.Generator().manual_seed(rank)
        with without_streams(), patch.object(gradient_layout, "_PART_BYTES", 64), patch.object(ByCollective, *noted):
            options = ExchangeOptions(backend, internode=by, slice_bags=4, wait_timeout_s=1e-4, **more)
            reach = Reach(rank, NODES[nodes], "emulated")
            gpu: Any = interpreted_parts(stage, world(), options, 9, reach)
            for number, sizes in enumerate(BATCH_SIZES[index] for index in (3, 2, 3, 3)):
                inputs, _ = stage.inputs(number, sizes)
                expected, step = exchange.start(inputs, sizes).wait(), Step(inputs, BatchSizes.of(sizes))
                pooled = gpu.forward.finish(gpu.forward.start(step))
                gpu.forward.check()
                if number == 0:
                    assert_same(pooled, expected.detach(), f"{options}")
                gradient = torch.randn(pooled.shape, generator=generator).to(pooled.dtype)
                expected.backward(gradient)
                pending = gpu.backward.note_forward(step)
                gpu.backward.finish(gpu.backward.start(pending, gradient))
                gpu.backward.check()
                del pooled, expected
                if number < 2:  # the third step has the window of the first, the last one the other
                    gpu.forward.skip()
                    gpu.backward.skip()
            calls = (nodes != "4 of 1") + (by == "messages") + 1
            assert len(under_way) == 4 * calls, "in each step one of sums, of pooled rows, of gradients"
            assert all(work.waited for work in under_way), "a capture would end with a stream that was never joined"
            pushed = [gpu.backward.own, *gpu.backward.passed_on.values()]
            assert all(len(launches_of(each)) == 3 for each in pushed), "those of the first step serve the third"
            gpu.close()
        exchange.close()
        assert_all_near(stage.rows_and_states(), known.rows_and_states(), WEIGHT_TOLERANCE["fp32"], f"{backend}, {by}:")


def check_where_a_captured_step_sends_from_stays_under_the_interpreter(rank: int) -> None:
    """The addresses of a captured message's rows stay valid after steps of other sizes; later ones are freed."""
    rows_of_ranks = DeviceLookup.rows_of_ranks
    for internode in ("messages", "puts"):
        stage, made = Stage(OWNERS, rank), list[weakref.ref[torch.Tensor]]()

        def rows_of(*of: Any, made: list[weakref.ref[torch.Tensor]] = made) -> Windows:
            windows = rows_of_ranks(*of)
            made.append(weakref.ref(windows.addresses))
            return windows

        with (
            without_streams(),
            patch.object(DeviceLookup, "rows_of_ranks", rows_of),
            patch.object(launches, "_MOST", 1),
        ):
            options = ExchangeOptions("pgas", internode=internode, wait_timeout_s=1e-4)
            reach = Reach(rank, NODES["2 of 2"], "emulated")
            gpu: Any = interpreted_parts(stage, world(), options, 4, reach)
            at_once: list[int] = []
            for number, sizes in enumerate(((3, 2, 4, 1), (1, 1, 1, 1), (4, 4, 4, 4), (2, 1, 1, 1))):
                captured = {"is_initialized": lambda: True, "is_current_stream_capturing": lambda n=number: n == 0}
                with patch.multiple(launches, **captured):
                    inputs, expected = stage.inputs(number, sizes)
                    step = Step(inputs, BatchSizes.of(sizes))
                    pooled = gpu.forward.finish(gpu.forward.start(step))
                    assert_same(pooled, expected, f"{internode}, step {number}")
                    del pooled
                    gpu.forward.check()
                at_once.append(len(made))
        first, second = at_once[:2]
        assert (rank == 1) == (first == 0), "rank 1 has nothing to send"
        assert all(each() is not None for each in made[:first]), "a graph would read memory that has been given away"
        assert not any(each() is not None for each in made[first:second]), "the cache is not bounded"
        gpu.close()


def check_tables_that_are_all_cut_by_rows_put_no_rows_under_the_interpreter(rank: int) -> None:
    """A collective carries their sums, so puts have only signals."""
    stage = Stage([([], [])] * 4, rank, cut=CUT)
    with without_streams():
        options = ExchangeOptions("pgas", internode="puts", wait_timeout_s=1e-4)
        gpu: Any = interpreted_parts(stage, world(), options, 4, Reach(rank, NODES["2 of 2"], "emulated"))
        for number, sizes in enumerate(((3, 2, 4, 1), (1, 1, 1, 1), (4, 4, 4, 4))):
            inputs, expected = stage.inputs(number, sizes)
            step = Step(inputs, BatchSizes.of(sizes))
            assert_same(gpu.forward.finish(gpu.forward.start(step)), expected, f"step {number}")
            gpu.forward.check()
        gpu.close()


def _ids_of(rank: int, step: int, keys: Sequence[str], samples: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(keys) * samples,), generator=generator).int()
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator).int()
    return KeyedJaggedTensor(list(keys), values, lengths=lengths)


def _check_ids(rank: int, kind: type[IdExchange], nodes: str) -> None:
    """Check that this rank gets the ids of its tables from all ranks; one step is skipped."""
    stage, group, counters, most = Stage(OWNERS, rank), world(), StepCounters(CPU), 5
    layout, reach = joined(stage.layout), Reach(rank, NODES[nodes], "emulated")
    keys = sorted(shard.feature_name for shard in stage.shards)
    ids = IdLayout(layout, keys, BatchCapacity(most, dict.fromkeys(keys, (0, 3))))
    options = ExchangeOptions(wait_timeout_s=20.0 if kind is CpuIdExchange else 1e-3)
    context = ExchangeContext(layout, stage.tables, options, group, CPU, most, counters, ids=ids)
    regions = {**ids.windows.regions(4), **arrival_regions(ids.windows, reach)}
    exchange = kind(context, ids, WindowPair(ids.windows, open_arena(regions, group, CPU, reach), counters.ids))
    owned = [shard.feature_name for shard in stage.layout.by_owner[rank]]
    for step, samples in enumerate((5, 5, 2, 5, 3)):
        if step == 3:
            exchange.skip()
        batches = [_ids_of(source, step, keys, samples) for source in range(4)]
        if rank == 2:
            time.sleep(0.02)  # nobody may overtake it
        arrived = exchange.send(mine := batches[rank], mine.stride())
        exchange.check()
        for what in ("lengths", "values"):
            of = [getattr(batch[name], what)() for name in owned for batch in batches]
            expected = torch.cat([torch.empty(0, dtype=torch.int32), *of])
            found = getattr(arrived.ids, what)()[: expected.numel()].int()
            assert_same(found, expected, f"{what}, {kind.__name__}, {nodes}, step {step}")
    exchange.close()


def check_ids_reach_nodes_of_several_ranks(rank: int) -> None:
    for nodes in NODES:
        _check_ids(rank, CpuIdExchange, nodes)


def check_ids_reach_nodes_of_several_ranks_under_the_interpreter(rank: int) -> None:
    with without_streams():
        _check_ids(rank, IdExchange, "3 and 1")


def check_captured_steps_of_rows_on_two_nodes_under_the_interpreter(rank: int) -> None:
    """The plan cuts a table by rows over all ranks."""
    options = ["--data.tables.multi_hot", "[40, 0..6, 1, 1, 2, 1, 1, 1]", "--train.global_batch_size", "32"]
    options += ["--train.steps", "9", "--train.pipeline", "graph", "--train.dense_reduce", "collective"]
    options += ["--embedding.backend", "pgas", "--data.eval_samples", "32"]

    def train_on(nodes: int) -> torch.Tensor:
        trainer = make_trainer(quickstart(Path("unused"), "run", *options, "--embedding.nodes", f"{nodes}"))
        batches = iter([trainer.train_data.read(32 * step + 8 * rank, 8) for step in range(9)])
        losses = torch.stack([trainer.step(batches).clone() for _ in range(9)])
        (exchange,) = exchanges(trainer.model)
        assert exchange.layout.partial_sums
        forward: Any = exchange._open().forward
        assert (forward.transport is not None) == (nodes == 2)
        dist.barrier()
        trainer.close()
        return losses

    expected = train_on(1)
    with captures() as taken:
        assert_near(train_on(2), expected, LOSS_TOLERANCE["adagrad"], "loss")
    assert taken == {"captured": 2, "replayed": 4}


CHECKS: dict[str, Callable[[int], None]] = {
    name: function for name, function in list(globals().items()) if name.startswith("check_")
}
NAMES = [name for name in CHECKS if INTERPRETED or "interpreter" not in name]


def _run_check(name: str) -> None:
    CHECKS[name](dist.get_rank())


ended = cases_on_ranks(len(OWNERS), _run_check, NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_four_ranks(ended: Callable[[str], None], name: str) -> None:
    ended(name)
