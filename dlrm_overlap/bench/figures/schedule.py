"""`bench schedule`: in what order should a rank walk the destinations of its tasks?

Contenders: the baseline, and every backend that stores into its peers' memory, under each schedule and with the
configuration's put.
Extra columns: those of `harness.skew.Skew`, which say how evenly the ranks' own work is spread; the baseline has none.
"""

from dataclasses import asdict, fields, replace

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.bench.figures.forward import Row, measure_forward
from dlrm_overlap.bench.harness.contenders import Baseline, Contender, Overlap
from dlrm_overlap.bench.harness.skew import Skew, measure_skew
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.bench.stage_request import ForwardRequest
from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.kernels.schedule import SCHEDULES
from dlrm_overlap.train.ranks import Ranks


def run(request: ForwardRequest, ranks: Ranks) -> int:
    """Measure the figure on all ranks, which all call this, and return the exit code of `measure_forward`."""
    return measure_forward(request, ranks, _make_contenders, _skew_columns, shown=["skew_fraction"])


def _make_contenders(config: EmbeddingConfig, workload: Workload) -> list[Contender]:
    storing = [workload.exchange_options(config, name) for name, backend in BACKENDS.items() if backend.stores_to_peers]
    variants = [replace(options, schedule=schedule) for options in storing for schedule in SCHEDULES]
    return [Baseline(workload), *(Overlap(workload, variant) for variant in variants)]


def _skew_columns(contender: Contender, request: ForwardRequest) -> Row:
    if not isinstance(contender, Overlap):
        return dict.fromkeys(column.name for column in fields(Skew))
    return asdict(measure_skew(contender.workload, contender.options, request.iterations))
