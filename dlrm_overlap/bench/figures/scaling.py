"""`bench weak` and `bench strong`: how does every backend scale from 1 to 2, 4, .. ranks?

The global batch stays. Weak scaling keeps the tables of a rank, so the work of a rank stays; strong scaling keeps the
tables of all ranks together, so the work of all ranks stays.

Contenders: the baseline, TorchRec's own path, and every backend whose exchange is ours.

Extra columns:
    scaling_factor  a contender's time on one rank over its time on this many; under weak scaling 1 is ideal, under
                    strong scaling the number of ranks
    sync_ms         of the baseline: the time of an All-to-All that carries one number to each rank; `all_to_all_ms`
                    less this is the communication; Chen et al. 2024 call this synchronisation, and `unpack_ms`
                    unpacking
"""

from collections.abc import Sequence
from functools import partial

from dlrm_overlap.bench.figures.stage import every_backend
from dlrm_overlap.bench.harness.contenders import Baseline, Contender
from dlrm_overlap.bench.harness.forward import Row, measure_forward
from dlrm_overlap.bench.harness.timing import time_parts
from dlrm_overlap.bench.request import ForwardRequest
from dlrm_overlap.train.ranks import Ranks


def run(request: ForwardRequest, ranks: Ranks) -> int:
    """Measure the figure on all ranks, which all call this, and return the exit code of `measure_forward`."""
    return measure_forward(
        request,
        ranks,
        every_backend,
        extra_columns=_extra_columns,
        shown=["scaling_factor"],
        compare_worlds=_add_scaling,
    )


def _extra_columns(contender: Contender, request: ForwardRequest) -> Row:
    """Return the columns of a row, the scaling factor empty until all numbers of ranks have been measured."""
    sync_ms = None
    if isinstance(contender, Baseline):
        workload, step = contender.workload, partial(contender.step, one_number=True)
        _, sync_ms, _ = time_parts(step, 3, workload.batches, workload, request.iterations)
    return {"scaling_factor": None, "sync_ms": sync_ms}


def _add_scaling(measured: Sequence[Sequence[Row]]) -> None:
    """Fill in the scaling factors; `measured` holds the rows of each number of ranks, from one on."""
    for rows in measured:
        for row, alone in zip(rows, measured[0], strict=False):
            row["scaling_factor"] = alone["median_ms"] / row["median_ms"]
