"""Groups of rows that many programs finish at the same time, under any delays: each is completed once, and whole."""

from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.forward.put_pooled import completes
from dlrm_overlap.kernels.primitives import clock
from tests.gpu.exchange.place import Place, every

_ROWS = 6000  # so that some thousand programs run at the same time
_LONGEST_DELAY_NS = 20_000


@triton.jit
def _finish_under_delays(
    order, delays, rows, counts, left, wrong, group_rows, epoch, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Store row order[p] late and finish it; count in `left` completions of a group, in `wrong` missing rows."""
    program = tl.program_id(0)
    row = tl.load(order + program)
    began = clock(0, INTERPRETED)
    turn = 0
    while clock(turn, INTERPRETED) - began < tl.load(delays + program):  # pyright: ignore[reportOperatorIssue]
        turn += 1000
    lane = tl.arange(0, WIDTH)
    tl.store(rows + row * WIDTH + lane, tl.zeros((WIDTH,), tl.int64) + epoch)
    group = row // group_rows
    if completes(counts + group, 1, group_rows):
        tl.atomic_add(left + group, 1)
        for at in range(group * group_rows, (group + 1) * group_rows):
            late = tl.sum((tl.load(rows + at * WIDTH + lane) != epoch).to(tl.int32), 0)
            tl.atomic_add(wrong, late)


def _check(place: Place, group_rows: int) -> None:
    """Finish all groups in many epochs, which are not consecutive."""
    random: dict[str, Any] = {"generator": place.generator(group_rows), "device": place.device}
    count, width, epochs = (_ROWS // group_rows * group_rows, 64, 300) if place.on_gpu else (2 * group_rows, 4, 2)
    rows = torch.zeros(count, width, dtype=torch.int64, device=place.device)
    groups = count // group_rows
    counts, left, wrong = (torch.zeros(n, dtype=torch.int32, device=place.device) for n in (groups, groups, 1))
    kernel: Any = _finish_under_delays
    for number in range(epochs):
        nearly = torch.arange(count, device=place.device) + torch.randint(0, 500, (count,), **random)
        delays = torch.randint(0, _LONGEST_DELAY_NS, (count,), **random)
        kernel[(count,)](
            nearly.argsort(), delays, rows, counts, left, wrong, group_rows, 10 + 3 * number,
            WIDTH=width, INTERPRETED=INTERPRETED, num_warps=2,
        )  # fmt: skip
    assert not counts.any(), "rows stay counted"
    assert (left == epochs).all(), f"groups completed {sorted(set(left.tolist()))} times in {epochs} epochs"
    assert not wrong.any(), f"{int(wrong)} numbers were missing when their group was completed"


CHECKS = every("gathering", _check, group_rows=(1, 40, 280))
