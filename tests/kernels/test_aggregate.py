"""The aggregator on the device against its twin in plain Python, under Triton's interpreter, whose time are turns."""

import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dlrm_overlap.comm.record import Record
from dlrm_overlap.kernels.aggregate import await_parts, finish_rows, next_put, put_signal_value
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.grouping import Aggregator, Grouping
from tests.agreement import assert_same
from tests.kernels.emulation import CPU, interpreted

pytestmark = interpreted

_NEVER = 1 << 40


@triton.jit
def _finish(
    order, times, counts, done, sent, stamps, puts, signals, parts, group_parts, epoch, longest_wait, whole,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Finish a row of part order[p] at times[p], note in `puts` [parts, 2] who puts what, and set the signals."""
    program = tl.program_id(0)
    part, now = tl.load(order + program), tl.load(times + program)
    mine = finish_rows(
        counts, 1, whole, done, sent, stamps, part, parts, group_parts, epoch, longest_wait, now, INTERPRETED
    )  # fmt: skip
    while mine != 0:
        first, count, mine = next_put(mine)
        at = part // group_parts * group_parts + first
        tl.store(puts + at * 2, program)
        tl.store(puts + at * 2 + 1, count)
        tl.store(signals + at, put_signal_value(epoch, count))


@triton.jit
def _await(
    signals, first, parts, group_parts, epoch, timeout, status, LANES: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    rank = tl.program_id(0)
    await_parts(
        signals, first, parts, group_parts, rank, rank + 1, epoch, timeout, status, LANES, "stores", INTERPRETED
    )  # fmt: skip


class _Message:
    """A message's words, as they are kept from epoch to epoch."""

    def __init__(self, grouping: Grouping) -> None:
        self.grouping = grouping
        self.done, self.sent = (torch.zeros(grouping.groups, dtype=torch.int64) for _ in range(2))
        self.stamps, self.signals = (torch.zeros(grouping.parts, dtype=torch.int64) for _ in range(2))
        self.counts = torch.zeros(grouping.parts, dtype=torch.int32)

    def finish(self, order: list[int], times: list[int], epoch: int, wait: int, rows: int) -> list[tuple[int, range]]:
        """Return the puts, each with the program that puts it, in the order of their first parts."""
        puts = torch.full((self.grouping.parts, 2), -1)
        kernel: Any = _finish
        kernel[(len(order),)](
            torch.tensor(order), torch.tensor(times), self.counts, self.done, self.sent, self.stamps, puts,
            self.signals, self.grouping.parts, self.grouping.group_parts, epoch, wait, rows, INTERPRETED=INTERPRETED
        )  # fmt: skip
        found = [(at, program, count) for at, (program, count) in enumerate(puts.tolist()) if count >= 0]
        return [(program, range(at, at + count)) for at, program, count in found]


@pytest.mark.parametrize(
    ("parts", "group", "wait", "rows"), [(9, 4, 9, 1), (3, 1, _NEVER, 2), (5, 32, _NEVER, 1), (5, 3, 0, 1)]
)
def test_a_program_puts_what_the_rule_says(parts: int, group: int, wait: int, rows: int) -> None:
    grouping, choices = Grouping(parts, 1, group), random.Random(parts)
    message = _Message(grouping)
    for epoch in (1, 4):  # epochs are skipped, and nothing is reset
        order = choices.sample(range(parts), parts) * rows
        times = sorted(choices.randrange(30) for _ in order)
        plain = Aggregator(grouping, wait)
        expected = [
            (program, each)
            for program, (part, now) in enumerate(zip(order, times, strict=True))
            if program >= parts * (rows - 1)  # the part's last row
            for each in plain.finish(part, now)
        ]
        found = message.finish(order, times, epoch, wait, rows)
        assert found == sorted(expected, key=lambda put: put[1].start), f"epoch {epoch}"
        assert_same(message.counts, torch.zeros_like(message.counts), "counts")


def test_what_has_come_is_found_along_the_signals() -> None:
    message = _Message(Grouping(11, 1, 4))
    message.signals[:] = 3 << 8 | 4  # of two epochs before, gathered otherwise
    message.finish([1, 0, 4, 5, 7, 3, 6], [0, 10, 11, 12, 13, 14, 15], epoch=5, wait=3, rows=1)

    def missing(parts: int, first: int = 0) -> list[int] | None:
        record = Record(CPU)
        kernel: Any = _await
        kernel[(1,)](message.signals, first, parts, 4, 5, 3, record.status, LANES=2, INTERPRETED=INTERPRETED)
        return record.expired()

    assert missing(2) is None
    assert missing(4, first=4) is None
    assert missing(11) == [0, 1, 2, 5, 3]
    assert missing(7, first=4) == [0, 1, 8, 5, 3]
    message.finish([9, 2, 8, 10], [20, 21, 22, 23], epoch=5, wait=3, rows=1)
    assert missing(11) is None
