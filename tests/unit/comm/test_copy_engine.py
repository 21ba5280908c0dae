"""What a copy engine refuses, on CPU tensors: nothing reaches a GPU by then. What it copies is checked on GPUs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_overlap.comm.calls import COPIED_FROM_BYTES, fastest_way
from dlrm_overlap.comm.copy_engine import Copy2D, CopyEngine, _check
from dlrm_overlap.config import InputError
from tests.conftest import read_rows
from tests.distributed.interpreted import without_streams
from tests.pages import is_todays

BYTES, WORD = torch.zeros(6, 4, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    with without_streams():
        yield CopyEngine(torch.device("cpu"))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda engine: engine.copy(BYTES, BYTES[:5]), "(5, 4) torch.uint8 to (6, 4) torch.uint8"),
        (lambda engine: engine.copy(BYTES.int(), BYTES), "give tensors of one shape and type"),
        (lambda engine: engine.copy(BYTES.t(), BYTES.t()), "copy its rows by a Copy2D"),
        (lambda _: Copy2D.of(BYTES.view(-1), BYTES.view(-1)), "must be [rows, columns]"),
        (lambda _: Copy2D.of(BYTES[:4], BYTES[:4].t()), "the source has strides (1, 4)"),
        (lambda _: Copy2D.of(BYTES[:1].expand(6, 4), BYTES), "the destination has strides (0, 1)"),
        (lambda engine: engine.write_flag(WORD.int(), WORD), "the flag is (1,) torch.int32"),
        (lambda engine: engine.write_flag(WORD, WORD.expand(2)), "the word is (2,) torch.int64"),
        (lambda engine: engine.wait_counter(WORD, 0), "count 0: must be one int64 and a count of 1 or more"),
    ],
)
def test_what_no_copy_engine_can_do_is_refused(engine: CopyEngine, call: Callable[..., Any], told: str) -> None:
    with pytest.raises(InputError) as error:
        call(engine)
    assert told in str(error.value)


def test_one_row_has_no_pitch_but_its_width() -> None:
    far = torch.zeros(1).as_strided((1, 1), (1 << 30, 1))  # as of a row of a tensor whose rows have 4 GiB
    assert Copy2D.of(torch.zeros(1, 1), far)[1:] == (4, far.data_ptr(), 4, 4, 1)
    wide = torch.zeros(3, 4)
    assert Copy2D.of(torch.zeros(3, 2), wide[:, :2])[1:] == (8, wide.data_ptr(), 16, 8, 3)


def test_an_error_of_cuda_is_told_by_its_name() -> None:
    class Returned:
        value, name = 700, "cudaErrorIllegalAddress"

    def cudaMemcpy2DAsync(*_: object) -> tuple[Returned]:  # noqa: N802
        return (Returned(),)

    with pytest.raises(RuntimeError, match=r"CUDA error: cudaMemcpy2DAsync returned cudaErrorIllegalAddress"):
        _check(cudaMemcpy2DAsync, 1)


@pytest.mark.parametrize(("case", "least"), COPIED_FROM_BYTES.items())
def test_large_rows_are_copied_and_small_ones_stored(case: tuple[str, bool], least: int) -> None:
    beside, captured = case
    assert (fastest_way(least - 1, beside, captured), fastest_way(least, beside, captured)) == ("stores", "dma")


def test_no_way_is_faster_than_the_chosen_one_by_more_than_a_twentieth() -> None:
    medians: dict[tuple[str, ...], dict[str, float]] = {}
    best: dict[tuple[str, ...], float] = {}
    for row in read_rows(Path("docs/results/collectives.csv")):
        case = row["operation"], row["beside"], row["captured"], row["mb_per_peer"]
        median = float(row["median_ms"])
        best[case] = min(median, best.get(case, median))
        if is_todays(row):
            medians.setdefault(case, {})[row["contender"]] = median
    assert best
    for case, least in best.items():
        way = fastest_way(int(case[3]) << 20, case[1], case[2] == "True")
        assert medians[case][way] <= least / 0.95, f"{case}: {way}, of {medians[case]}"
