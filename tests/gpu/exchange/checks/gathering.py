"""Parts that many programs finish at once, under any delays: each leaves once, whole, and none stays behind."""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.aggregate import Gathered, finish_rows, next_put
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.primitives import clock
from tests.gpu.exchange.place import Check, Place

_PARTS, _ROWS = 150, 40  # so that some thousand programs are under way
_GROUPS = (1, 7, 32)
_LONGEST_DELAY_NS = 20_000


@triton.jit
def _finish_under_delays(
    order, delays, rows, counts, done, sent, stamps, left, wrong,
    parts, group_parts, part_rows, epoch, longest_wait, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store row order[p], late, and finish it; count what leaves in `left` [parts], and rows that are not there yet."""
    program = tl.program_id(0)
    row = tl.load(order + program)
    began = clock(0, INTERPRETED)
    turn = 0
    while clock(turn, INTERPRETED) - began < tl.load(delays + program):
        turn += 1000
    lane = tl.arange(0, WIDTH)
    tl.store(rows + row * WIDTH + lane, tl.zeros((WIDTH,), tl.int64) + epoch)
    part = row // part_rows
    leaving = finish_rows(
        counts, 1, part_rows, done, sent, stamps, part, parts, group_parts, epoch.to(tl.int64), longest_wait,
        program, INTERPRETED,
    )  # fmt: skip
    while leaving != 0:
        first, count, leaving = next_put(leaving)
        first += part // group_parts * group_parts
        for at in range(first, first + count):
            tl.atomic_add(left + at, 1)
        for at in range(first * part_rows, (first + count) * part_rows):
            late = tl.sum((tl.load(rows + at * WIDTH + lane) != epoch).to(tl.int32), 0)
            tl.atomic_add(wrong, late)


def _check(place: Place, group_parts: int, longest_wait_us: float | None) -> None:
    """Finish all parts in many epochs, some of which are skipped."""
    random: dict[str, Any] = {"generator": place.generator(group_parts), "device": place.device}
    parts, part_rows, width, epochs = (_PARTS, _ROWS, 64, 300) if place.on_gpu else (5, 2, 4, 2)
    gathered = Gathered.of(parts, longest_wait_us, place.device)
    rows = torch.zeros(parts * part_rows, width, dtype=torch.int64, device=place.device)
    left, wrong = (torch.zeros(n, dtype=torch.int32, device=place.device) for n in (parts, 1))
    kernel: Any = _finish_under_delays
    for number in range(epochs):
        nearly = torch.arange(len(rows), device=place.device) + torch.randint(0, 500, (len(rows),), **random)
        delays = torch.randint(0, _LONGEST_DELAY_NS, (len(rows),), **random)
        kernel[(len(rows),)](
            nearly.argsort(), delays, rows, gathered.counts, gathered.done, gathered.sent, gathered.stamps, left, wrong,
            parts, group_parts, part_rows, 10 + 3 * number, gathered.longest_wait,
            WIDTH=width, INTERPRETED=INTERPRETED, num_warps=2,
        )  # fmt: skip
    assert not gathered.counts.any(), "rows stay counted"
    assert (left == epochs).all(), f"parts left {sorted(set(left.tolist()))} times in {epochs} epochs"
    assert not wrong.any(), f"{int(wrong)} numbers were not there when their part left"


CHECKS = {
    f"gathering_{group}_{'never' if wait is None else f'{wait:g}_us'}": Check(
        partial(_check, group_parts=group, longest_wait_us=wait)
    )
    for group in _GROUPS
    for wait in (None, 5.0, 0.0)
}
