"""`bench weak` and `bench strong`: how does every backend scale from 1 to 2, 4, .. ranks?

The global batch stays. Weak scaling keeps the tables of a rank, so the work of a rank stays; strong scaling keeps the
tables of all ranks together, so the work of all ranks stays.

Contenders: the baseline, TorchRec's own path, and every backend whose exchange is ours.
Extra column: `scaling_factor`, a contender's time on one rank over its time on this many. Under weak scaling 1 is
ideal, under strong scaling the number of ranks.
"""

from collections.abc import Sequence

from dlrm_overlap.bench.figures.forward import Row, measure_forward
from dlrm_overlap.bench.figures.stage import every_backend
from dlrm_overlap.bench.stage_request import ForwardRequest
from dlrm_overlap.ranks import Ranks


def run(request: ForwardRequest, ranks: Ranks) -> int:
    """Measure the figure on all ranks, which all call this, and return the exit code of `measure_forward`."""
    return measure_forward(
        request,
        ranks,
        every_backend,
        extra_columns=lambda contender, request: {"scaling_factor": None},  # until all worlds have been measured
        shown=["scaling_factor"],
        compare_worlds=_add_scaling,
    )


def _add_scaling(measured: Sequence[Sequence[Row]]) -> None:
    """Fill in the scaling factors; `measured` holds the rows of each number of ranks, from one on."""
    for rows in measured:
        for row, alone in zip(rows, measured[0], strict=False):
            row["scaling_factor"] = alone["median_ms"] / row["median_ms"]
