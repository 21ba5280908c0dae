"""Models with unpooled tables, plans and ways to train them, drawn by hypothesis as in `plans`."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import hypothesis.strategies as st
import torch
from torchrec.modules.embedding_configs import DataType

from dlrm_overlap.embedding import distinct as distinct_ids
from dlrm_overlap.embedding.id_layout import BatchCapacity
from tests.agreement import WEIGHT_TOLERANCE, assert_all_near, assert_same
from tests.distributed.captured import captures
from tests.distributed.models import CPU, Table
from tests.distributed.plans import drawn_tables, happens
from tests.distributed.unpooled import Case, our_sharders, torchrec_sharders, train

KINDS = ("table_wise", "column_wise", "row_wise")
"""TorchRec's ways to shard unpooled tables, without data-parallel, which it pools on a CPU"""


class Way(NamedTuple):
    backend: str
    pipeline: str
    """graph or, by a stand-in for CUDA graphs, captured"""
    least_block: int
    """slots, see `SlotBlocks`"""


class Drawn(NamedTuple):
    case: Case
    ways: Sequence[Way]


@st.composite
def drawn_sequences(draw_from: st.DrawFn, ranks: int, local: int) -> Drawn:
    draw = draw_from(st.randoms(use_true_random=False))
    dim = draw.choice([4, 8, 20, 192])
    tables = drawn_tables(draw, iter(range(100)), ranks, local, 4, KINDS, [dim])
    cuts = draw.choice([cuts for cuts in range(1, ranks + 1) if dim % (4 * cuts) == 0])
    tables = {
        name: _as_torchrec_takes_it(draw, table, ranks, cuts)._replace(cached=happens(draw, 0.3))
        for name, table in tables.items()
    }
    features = list(dict.fromkeys(name for table in tables.values() for name in table.features))
    pooled = happens(draw, 0.3)
    features += ["unused", *["p", "q"] * pooled]
    # The stand-in for CUDA graphs takes thirty times as long.
    pipelines = [*["graph"] * 3, *["captured"] * happens(draw, 0.3)]
    ways = [
        Way(draw.choice(["pgas", "fused"]), draw.choice(pipelines), draw.choice([1, distinct_ids._LEAST_BLOCK]))
        for _ in range(2)
    ]
    captured = any(way.pipeline == "captured" for way in ways)
    even = captured or happens(draw, 0.5)
    rows = DataType.FP16 if happens(draw, 0.2) else DataType.FP32
    sizes = {name: draw.choice([(1, 1), (0, 0), (0, 1), (0, 4), (3, 3), (2, 9)]) for name in features}
    samples = [draw.randrange(1, 7)] * ranks if even else [draw.randrange(7) for _ in range(ranks)]
    capacity = (
        BatchCapacity(samples[0], sizes, distinct={name: t.rows for name, t in tables.items()}) if captured else None
    )
    case = Case(
        tables=tables,
        features=draw.sample(features, len(features)),
        sizes=sizes,
        samples=samples,
        optimizer=draw.choice(["sgd", "adagrad", "rowwise_adagrad"]),
        pooled=pooled,
        steps=7 if captured else 3,
        capacity=capacity,  # learnt from so few samples it grows, and steps between are eager
        need_indices=happens(draw, 0.5),
        clipped=happens(draw, 0.2),
        rows=rows,
        few=draw.choice([0, 2]),
        ids=draw.choice([torch.int32, torch.int64]),
    )
    return Drawn(case, ways)


def _as_torchrec_takes_it(draw: random.Random, table: Table, ranks: int, cuts: int) -> Table:
    """Return a table that names no feature twice, since TorchRec would give it twice as many columns.

    FBGEMM takes unpooled shards of one width. TorchRec's Adagrad has written outside its memory on a CPU if a rank had
    several shards of a table's columns.
    """
    table = table._replace(features=list(dict.fromkeys(table.features)))
    if table.kind != "column_wise":
        return table
    return table._replace(ranks=draw.sample(range(ranks), cuts), cuts=cuts)


def compare_unpooled(drawn: Drawn, _: Path) -> Iterator[Callable[[], None]]:
    """Train by TorchRec and in the drawn ways; yield a check of each way: outputs, weights, states, captured steps."""
    case = drawn.case
    torchrec = train(case, torchrec_sharders(case), "none", CPU)
    # Clipped gradients of a row have one size and both signs, so a sum of a hundred may cancel, as a first moment does.
    fp32 = "first_moments" if case.clipped else "fp32"
    tolerance = WEIGHT_TOLERANCE["fp16_rows" if case.rows == DataType.FP16 else fp32]
    for way in drawn.ways:
        sharders: list[Any] = our_sharders(case, backend=way.backend)
        captured = way.pipeline == "captured"
        blocks = patch.object(distinct_ids, "_LEAST_BLOCK", way.least_block)
        with blocks, captures() if captured else nullcontext() as taken:
            ours = train(case, sharders, "graph" if captured else way.pipeline, CPU)
        expected = {key: value for key, value in torchrec.items() if key in ours}

        def check(ours: dict[str, Any] = ours, expected: dict[str, Any] = expected, taken: Any = taken) -> None:
            assert_same(ours["output of step 0"], expected["output of step 0"], "first output")
            assert_all_near(ours, expected, tolerance, "")
            assert taken in (None, {"captured": 2, "replayed": case.steps - 5}), f"steps {taken}"

        yield check
