"""`FusedTables` against FBGEMM's own lookup: our update in Triton's interpreter, or FBGEMM's on CPUs."""

import copy
import gc
import logging
import re
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    LearningRateMode,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

from dlrm_overlap import FusedTables
from dlrm_overlap.embedding.fused_tables import _unsupported
from dlrm_overlap.torchrec_private.check import check_private_api
from tests.agreement import assert_near, assert_same
from tests.conftest import refuses
from tests.distributed.interpreted import updating, without_streams
from tests.kernels.emulation import interpreted

SAMPLES = 6
TABLES, FEATURES = [(9, 8), (5, 12), (7, 8)], [0, 0, 1, 2]  # two features of the first table
SAME_DIM = [(9, 8), (5, 8), (7, 8)]
OPTIMIZERS = [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]


def _make(kind: Any, tables: list[tuple[int, int]] = TABLES, **options: Any) -> Any:
    specs = [(*table, EmbeddingLocation.HOST, ComputeDevice.CPU) for table in tables]
    known: dict[str, Any] = {"feature_table_map": FEATURES, "learning_rate": 0.5, "eps": 0.25, "device": "cpu"}
    tbe = kind(specs, **(known | options))
    torch.manual_seed(0)
    for rows in tbe.split_embedding_weights():
        rows.normal_()
    return tbe


def _batch(step: int, weighted: bool = False, tables: list[tuple[int, int]] = TABLES) -> tuple[torch.Tensor, ...]:
    """Return ids of bags of 0 to 3 ids; one feature has none, and one bag 20 ids, many of one row."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(FEATURES), SAMPLES), generator=generator)
    lengths[2], lengths[3, 1] = 0, 20
    counts = lengths.sum(1).tolist()
    ids = [
        torch.randint(0, tables[table][0], (count,), generator=generator)
        for table, count in zip(FEATURES, counts, strict=True)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    values = torch.cat(ids)
    if not weighted:
        return values, offsets
    return values, offsets, torch.randint(-4, 5, values.shape, generator=generator) / 4


def _train(tbe: Any, batch: tuple[torch.Tensor, ...], step: int = 0) -> torch.Tensor:
    output = tbe(*[each.clone() for each in batch])
    generator = torch.Generator().manual_seed(100 + step)
    output.backward((torch.randint(-16, 17, output.shape, generator=generator) / 8).to(output.dtype))
    return output.detach()


def _assert_equal(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    every = [chain(tbe.split_embedding_weights(), *tbe.split_optimizer_states()) for tbe in (ours, theirs)]
    for number, (actual, expected) in enumerate(zip(*every, strict=True)):
        assert_near(actual, expected, tolerance, f"rows or states {number}")


@pytest.fixture
def no_streams() -> Iterator[None]:
    check_private_api()  # looks at FBGEMM's own operators, once
    with without_streams():
        yield


@interpreted
@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [(PoolingMode.SUM, False), (PoolingMode.SUM, True), (PoolingMode.MEAN, False), (PoolingMode.NONE, False)],
)
def test_rows_and_states_are_those_of_fbgemm_after_several_steps(
    optimizer: EmbOptimType, pooling: PoolingMode, weighted: bool
) -> None:
    """Bags are empty or name a row twice; the learning rate changes after a forward, which keeps the old one."""
    tables = SAME_DIM if pooling == PoolingMode.NONE else TABLES
    options: dict[str, Any] = {"tables": tables, "optimizer": optimizer, "pooling_mode": pooling}
    theirs = _make(SplitTableBatchedEmbeddingBagsCodegen, **options)
    ours = updating(_make(FusedTables, **options))
    start = theirs.split_embedding_weights()[0].clone()
    for step in range(3):
        batch = _batch(step, weighted, tables)
        assert_near(_train(ours, batch, step), _train(theirs, batch, step), 1e-5, f"output of step {step}")
        for tbe in (ours, theirs):
            tbe.set_learning_rate(0.25 * (step + 1))
    assert ours.row_update._known is not None, "our kernels have updated the rows"
    assert not torch.equal(theirs.split_embedding_weights()[0], start)
    _assert_equal(ours, theirs)


def _pair(**options: Any) -> tuple[Any, Any]:
    return updating(_make(FusedTables, **options)), _make(SplitTableBatchedEmbeddingBagsCodegen, **options)


@interpreted
@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clipping": True, "max_gradient": 0.5},
        {"weights_precision": SparseType.FP16, "stochastic_rounding": False},
        {"output_dtype": SparseType.FP16},
        {"bounds_check_mode": BoundsCheckMode.WARNING},
        {"bounds_check_mode": BoundsCheckMode.NONE},
        {"feature_table_map": None, "tables": [(9, 8)] * 4},
    ],
    ids=str,
)
def test_options_have_the_same_meaning(options: dict[str, Any]) -> None:
    ours, theirs = _pair(**options)
    values, offsets, weights = _batch(0, weighted=True, tables=options.get("tables", TABLES))
    if options.get("bounds_check_mode") == BoundsCheckMode.WARNING:
        values[::3] = 99  # row 0 is taken
    ids = values.int(), offsets, weights.double()
    for tbe in (ours, theirs):
        _train(tbe, ids)
    _assert_equal(ours, theirs, 1e-3 if "weights_precision" in options else 1e-5)


@interpreted
@pytest.mark.usefixtures("no_streams")
@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.NONE])
def test_backwards_come_in_any_order_with_the_rule_of_their_forward(pooling: PoolingMode) -> None:
    """Gradients are of any layout, a backward may be repeated, and a step may have no ids."""
    tables = SAME_DIM if pooling == PoolingMode.NONE else TABLES
    ours, theirs = _pair(tables=tables, pooling_mode=pooling)
    for tbe in (ours, theirs):
        first = tbe(*_batch(0, tables=tables))
        tbe.set_learning_rate(2.0)
        second = tbe(*_batch(1, tables=tables))
        tbe.set_learning_rate(0.0)
        second.sum().backward(retain_graph=tbe is ours)
        gradient = torch.arange(2.0 * first.numel()).view(first.shape[1], -1)[:, ::2].t() / 64
        first.backward(gradient)
        empty = tbe(torch.zeros(0, dtype=torch.int64), torch.zeros(len(FEATURES) * SAMPLES + 1, dtype=torch.int64))
        empty.sum().backward()
    _assert_equal(ours, theirs)
    before = ours.split_embedding_weights()[0].clone()
    second = ours(*_batch(1, tables=tables))  # at rate 0
    second.sum().backward()
    assert_same(ours.split_embedding_weights()[0], before, "rows")


@interpreted
@pytest.mark.usefixtures("no_streams")
def test_rows_that_move_are_found_again() -> None:
    ours, theirs = _pair()
    for step in range(2):
        for tbe in (ours, theirs):
            _train(tbe, _batch(step), step)
        ours.weights_host.data = ours.weights_host.data.clone()
        updating(ours)
    _assert_equal(ours, theirs)


@interpreted
@pytest.mark.usefixtures("no_streams")
def test_tables_are_freed_with_their_last_reference() -> None:
    ours, _ = _pair()
    _train(ours, _batch(0))
    alive = weakref.ref(ours)
    gc.disable()
    try:
        del ours
        assert alive() is None
    finally:
        gc.enable()


@interpreted
@pytest.mark.usefixtures("no_streams")
def test_without_gradients_nothing_is_sorted_or_updated() -> None:
    ours, _ = _pair()
    before = ours.split_embedding_weights()[0].clone()
    with torch.no_grad():
        assert not ours(*_batch(0)).requires_grad
    ours.requires_grad_(False)
    assert not ours(*_batch(0)).requires_grad
    assert ours._row_update is None
    assert_same(ours.split_embedding_weights()[0], before, "rows")


@interpreted
@pytest.mark.usefixtures("no_streams")
def test_calls_that_our_update_lacks_take_fbgemms_and_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = _pair()
    values, offsets, weights = _batch(0, weighted=True)
    sizes = [[SAMPLES]] * len(FEATURES)
    trained = [weights.clone().requires_grad_() for _ in range(2)]
    with caplog.at_level(logging.WARNING, "dlrm_overlap"):
        for tbe, own in zip((ours, theirs), trained, strict=True):
            for _ in range(2):
                tbe(values, offsets, own).sum().backward()
            tbe(values, offsets, batch_size_per_feature_per_rank=sizes).sum().backward()
            tbe(values, offsets, weights, torch.ones(len(FEATURES))).sum().backward()
    assert ours._row_update is None
    for expected, actual in zip(theirs.split_embedding_weights(), ours.split_embedding_weights(), strict=True):
        assert_same(actual, expected, "rows")
    gradients: list[Any] = [each.grad for each in trained]
    assert_same(gradients[0], gradients[1], "gradients of the weights")
    assert [record.getMessage().split(":")[1].strip() for record in caplog.records] == [
        "per_sample_weights that require a gradient",
        "batch_size_per_feature_per_rank",
        "feature_requires_grad",
    ]


@pytest.mark.parametrize("is_updated", [False, pytest.param(True, marks=interpreted)])
def test_state_dicts_load_both_ways_and_copies_go_on(is_updated: bool) -> None:
    options: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    ours, theirs = _make(FusedTables, **options), _make(SplitTableBatchedEmbeddingBagsCodegen, **options)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    check_private_api()
    with without_streams() if is_updated else nullcontext():
        if is_updated:
            updating(ours)
        _train(ours, _batch(0))
        state = {name: each for name, each in ours.state_dict().items() if not name.endswith("_dev")}
        theirs.load_state_dict(state, strict=False)
        _assert_equal(theirs, ours, 0.0)
        _train(theirs, _batch(1))
        state = {name: each for name, each in theirs.state_dict().items() if not name.endswith("_dev")}
        ours.load_state_dict(state, strict=False)
        _assert_equal(ours, theirs, 0.0)
        copied = copy.deepcopy(ours)
        for tbe in (ours, copied, theirs):
            tbe.set_learning_rate(0.125)
            _train(tbe, _batch(2))
    _assert_equal(copied, ours, 0.0)
    _assert_equal(ours, theirs, 1e-5)
    assert (ours._row_update is not None) == is_updated


def test_on_a_cpu_everything_is_fbgemms() -> None:
    ours, theirs = _make(FusedTables), _make(SplitTableBatchedEmbeddingBagsCodegen)
    for step in range(2):
        batch = _batch(step, weighted=True)
        assert_same(_train(ours, batch, step), _train(theirs, batch, step), "output")
    _assert_equal(ours, theirs, 0.0)


def test_the_program_of_the_page_runs() -> None:
    page = Path("docs/fused_tables.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    assert names["tables"].split_optimizer_states()[0][0].nonzero().flatten().tolist() == [3, 7]


_BY_COUNTER = CounterBasedRegularizationDefinition(learning_rate_mode=LearningRateMode.COUNTER_SGD)
_COUNTER = {
    "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "weight_decay_mode": WeightDecayMode.COUNTER,
    "counter_based_regularization": _BY_COUNTER,
}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tables": [(9, 1028)] * 3}, "dim 1028, at most 1024 is supported; cut the table by columns"),
        ({"feature_table_map": [1, 0, 2]}, r"feature_table_map \[1, 0, 2\] is not in the order of the tables; sort"),
        ({"weights_precision": SparseType.INT8}, "weights_precision INT8 is not FP32 or FP16; choose one"),
        (
            {"optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD},
            "optimizer .* is not one of sgd, .*; choose one of these",
        ),
        (_COUNTER, "a learning_rate_mode by a counter is not supported; leave it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_update_lacks_is_refused(options: dict[str, Any], reason: str) -> None:
    with refuses(f"^FusedTables: {reason}.*, or use FBGEMM's SplitTableBatchedEmbeddingBagsCodegen$"):
        _make(FusedTables, **options)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("embedding_specs", [(9, 8, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)], "a table in MANAGED_CACH"),
        ("output_dtype", SparseType.INT8.as_int(), "output_dtype INT8 is not"),
        ("weight_decay_mode", WeightDecayMode.COWCLIP, "weight_decay_mode COWCLIP is not one of NONE, L2, DECOUPLE"),
        ("use_writeback_bwd_prehook", True, "use_writeback_bwd_prehook is not supported; leave it out"),
        ("enable_raw_embedding_streaming", True, "enable_raw_embedding_streaming is not supported; leave it out"),
        ("momentum1_host", torch.zeros(40 * 4, dtype=torch.float16), "optimizer states of type torch.float16, but"),
    ],
)
def test_what_only_a_gpu_has_is_found(name: str, value: Any, reason: str) -> None:
    tables = _make(FusedTables, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    if isinstance(value, torch.Tensor):
        tables._parameters.pop(name)
    setattr(tables, name, value)
    assert next(_unsupported(tables), "").startswith(reason)
