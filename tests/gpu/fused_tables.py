"""The command: `python -m tests.gpu.fused_tables`, on one GPU, in about a minute.

Trains `FusedTables` and FBGEMM's lookup on the same batches, and compares their outputs, rows and states: optimizers,
poolings, types, two steps at once, state dicts. Needs no pytest; `dlrm-overlap bench update` has the times.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType

from dlrm_overlap import FusedTables
from dlrm_overlap.torchrec_private import (
    BoundsCheckMode,
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    EmbeddingLocation,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from tests.agreement import assert_near, assert_same
from tests.gpu.one_gpu import run_parts

DEVICE = torch.device("cuda", 0)
STEPS, SAMPLES, MOST_IDS, LONGEST = 5, 500, 12, 2000
STRESS_STEPS = 200
TABLES, FEATURES = [(3000, 64), (50, 128), (2, 32), (700, 12)], [0, 0, 1, 2, 3]  # the second has long runs
_TOLERANCE = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 2e-2}  # sums in another order, then rounded to the rows' type
_WITH_COUNTER: dict[str, Any] = {
    "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "weight_decay": 0.01,
    "weight_decay_mode": WeightDecayMode.COUNTER,
    "counter_based_regularization": CounterBasedRegularizationDefinition(),
}
_DECAYING: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay": 0.01}
_UNPOOLED = {"pooling_mode": PoolingMode.NONE}
CASES: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": EmbOptimType.EXACT_SGD},
    "Adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD},
    "row-wise Adagrad": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    "Adam": {"optimizer": EmbOptimType.ADAM, "weight_decay": 0.01},
    "partial row-wise Adam": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM},
    "LAMB": {"optimizer": EmbOptimType.LAMB},
    "partial row-wise LAMB": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_LAMB},
    "row-wise Adagrad, L2": {**_DECAYING, "weight_decay_mode": WeightDecayMode.L2},
    "row-wise Adagrad, decoupled": {**_DECAYING, "weight_decay_mode": WeightDecayMode.DECOUPLE, "max_norm": 2.0},
    "row-wise Adagrad, counter": _WITH_COUNTER,
    "means": {"pooling_mode": PoolingMode.MEAN},
    "clipped gradients": {"gradient_clipping": True, "max_gradient": 0.5},
    "unpooled": _UNPOOLED,
    "unpooled, Adagrad": {**_UNPOOLED, "optimizer": EmbOptimType.EXACT_ADAGRAD},
    "unpooled, Adam": {**_UNPOOLED, "optimizer": EmbOptimType.ADAM},
    "rows in float16": {"weights_precision": SparseType.FP16, "stochastic_rounding": False},
    "outputs in bfloat16": {"output_dtype": SparseType.BF16},
    "ids are not checked": {"bounds_check_mode": BoundsCheckMode.NONE},
}


def make(kind: Any, **options: Any) -> Any:
    """Return a lookup with random rows and states, the same in each call with the same options."""
    on_gpu = DEVICE.type == "cuda"
    place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    on = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    same_dim = options.get("pooling_mode") == PoolingMode.NONE
    specs = [(rows, 64 if same_dim else dim, place, on) for rows, dim in TABLES]
    known: dict[str, Any] = {"feature_table_map": FEATURES, "learning_rate": 0.05, "eps": 0.1, "device": DEVICE}
    tbe = kind(specs, **(known | options))
    generator = torch.Generator(DEVICE).manual_seed(0)
    for rows in tbe.split_embedding_weights():
        rows.copy_(torch.randn(rows.shape, generator=generator, device=DEVICE))
    if "counter_based_regularization" not in options:
        for states in tbe.split_optimizer_states():
            for state in states:
                state.uniform_(0.5, 1.5, generator=generator)
    return tbe


def make_batch(step: int, weighted: bool) -> tuple[torch.Tensor, ...]:
    """Return ids, offsets and perhaps weights: empty bags, a table without ids, a row in very many bags."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, MOST_IDS + 1, (len(FEATURES), SAMPLES), generator=generator)
    lengths[FEATURES.index(2)], lengths[1, 1] = 0, LONGEST
    rows = [TABLES[table][0] for table in FEATURES]
    ids = [
        torch.randint(0, count, (int(bags.sum()),), generator=generator)
        for count, bags in zip(rows, lengths, strict=True)
    ]
    ids[1][-LONGEST // 2 :] = 7
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    values = torch.cat(ids)
    weights = [torch.rand(values.shape, generator=generator)] if weighted else []
    return tuple(each.to(DEVICE) for each in (values, offsets, *weights))


def gradient_of(output: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(100 + step)
    return torch.randn(output.shape, generator=generator, device=DEVICE).to(output.dtype)


def train(tbe: Any, steps: range, weighted: bool) -> None:
    for step in steps:
        output = tbe(*make_batch(step, weighted))
        output.backward(gradient_of(output, step))
        tbe.set_learning_rate(0.05 / (1 + step))


def compare(ours: Any, theirs: Any, tolerance: float) -> None:
    tensors = [chain(tbe.split_embedding_weights(), *tbe.split_optimizer_states()) for tbe in (ours, theirs)]
    for number, (actual, expected) in enumerate(zip(*tensors, strict=True)):
        if expected.numel():
            assert_near(actual.float(), expected.float(), tolerance, f"rows or states {number}")
    if "iter" in theirs.state_dict():
        assert_same(ours.iter, theirs.iter, "iter")


def check_case(options: dict[str, Any]) -> None:
    ours, theirs = make(FusedTables, **options), make(SplitTableBatchedEmbeddingBagsCodegen, **options)
    weighted = options.get("pooling_mode") != PoolingMode.NONE
    output = ours(*make_batch(0, weighted))
    assert output.grad_fn is not None
    assert "Lookup" in type(output.grad_fn).__name__, "our backward is taken"
    for tbe in (ours, theirs):
        if hasattr(tbe, "iter_cpu"):
            tbe.iter_cpu.zero_()
            tbe.iter.zero_()
    for first in range(STEPS):
        train(ours, range(first, first + 1), weighted)
        train(theirs, range(first, first + 1), weighted)
        compare(ours, theirs, _TOLERANCE[options.get("weights_precision", SparseType.FP32).value])


def check_two_at_once() -> None:
    """Two forwards, then their backwards in the reverse order, each with the learning rate of its forward."""
    sides = [make(kind, optimizer=EmbOptimType.EXACT_ADAGRAD) for kind in (FusedTables, _FBGEMM)]
    for tbe in sides:
        first = tbe(*make_batch(0, weighted=True))
        tbe.set_learning_rate(0.3)
        second = tbe(*make_batch(1, weighted=True))
        tbe.set_learning_rate(0.0)
        second.backward(gradient_of(second, 1))
        first.backward(gradient_of(first, 0))
    compare(*sides, tolerance=_TOLERANCE["fp32"])


def check_32_bit_ids() -> None:
    sides = [make(kind, optimizer=EmbOptimType.EXACT_ADAGRAD) for kind in (FusedTables, _FBGEMM)]
    for tbe, id_type in zip(sides, (torch.int32, torch.int64), strict=True):
        values, offsets, weights = make_batch(0, weighted=True)
        output = tbe(values.to(id_type), offsets.to(id_type), weights)
        output.backward(gradient_of(output, 0))
    compare(*sides, tolerance=_TOLERANCE["fp32"])


def check_without_ids() -> None:
    tables = make(FusedTables)
    before = [rows.clone() for rows in tables.split_embedding_weights()]
    values, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(len(FEATURES) * SAMPLES + 1, dtype=torch.int64)
    output = tables(values.to(DEVICE), offsets.to(DEVICE))
    output.backward(gradient_of(output, 0))
    for rows, was in zip(tables.split_embedding_weights(), before, strict=True):
        assert_same(rows, was, "rows that no id names")


def check_weights_with_gradients() -> None:
    """FBGEMM's backward is taken, which also finds the gradients of the weights."""
    sides, gradients = [make(kind) for kind in (FusedTables, _FBGEMM)], []
    for tbe in sides:
        *ids, weights = make_batch(0, weighted=True)
        weights.requires_grad_()
        output = tbe(*ids, weights)
        output.backward(gradient_of(output, 0))
        gradients.append(weights.grad)
    assert_near(gradients[0], gradients[1], _TOLERANCE["fp32"], "gradients of weights")
    compare(*sides, tolerance=_TOLERANCE["fp32"])


def check_state_dicts() -> None:
    """A state dict of either loads into the other, and a copy of the module goes on like the module."""
    options = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    ours, theirs = make(FusedTables, **options), make(_FBGEMM, **options)
    train(ours, range(2), weighted=True)
    theirs.load_state_dict(ours.state_dict())
    compare(theirs, ours, tolerance=0.0)
    train(theirs, range(2, 3), weighted=True)
    ours.load_state_dict(theirs.state_dict())
    copied = copy.deepcopy(ours)
    for tbe in (ours, copied):
        tbe.set_learning_rate(0.01)
        train(tbe, range(3, 4), weighted=True)
    for rows, expected in zip(copied.split_embedding_weights(), ours.split_embedding_weights(), strict=True):
        assert_same(rows, expected, "rows of a copy")


def check_streams() -> None:
    """Ids are freed at once and the CPU is far ahead; the rows have the same bits as with a wait after each call."""
    found = []
    for waits in (False, True):
        tables = make(FusedTables, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
        batches = [make_batch(step, weighted=True) for step in range(4)]
        for step in range(STRESS_STEPS):
            output = tables(*[each.clone() for each in batches[step % 4]])
            gradient = output.detach() * 0.01
            if waits:
                torch.cuda.synchronize()
            output.backward(gradient)
            del output, gradient
            torch.full((1 << 18,), -1, device=DEVICE)  # takes memory that was freed too early
            if waits:
                torch.cuda.synchronize()
        found.append([rows.clone() for rows in tables.split_embedding_weights()])
    for rows, expected in zip(*found, strict=True):
        assert_same(rows, expected, "rows with and without waits")


_FBGEMM = SplitTableBatchedEmbeddingBagsCodegen
PARTS: dict[str, Callable[[], None]] = {
    **{name: partial(check_case, options) for name, options in CASES.items()},
    "two steps at once": check_two_at_once,
    "32-bit ids": check_32_bit_ids,
    "no ids": check_without_ids,
    "weights with gradients": check_weights_with_gradients,
    "state dicts and copies": check_state_dicts,
    "streams": check_streams,
}


def main() -> int:
    """Run the checks; return 1 if one failed, 2 without a GPU."""
    if not torch.cuda.is_available():
        print("tests.gpu.fused_tables: no GPU is there, and one must be; run it where nvidia-smi shows one")
        return 2
    torch.cuda.set_device(DEVICE)
    return int(run_parts(PARTS) > 0)


if __name__ == "__main__":
    sys.exit(main())
