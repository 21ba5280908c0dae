"""`bench slice`: how large should the slices be that a persistent kernel puts?

Contenders: the baseline; `pgas`, which has no slices, to compare with; and every backend that has slices, with each of
the sizes 4, 8, .., 128 bags. No extra column: `slice_bags` is a column of every figure of the forward.

Slices are staged and copied (`stores`) unless `embedding.put` names another put, since in place there are no slices.
"""

from dataclasses import replace

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.bench.harness.contenders import Baseline, Contender, Overlap
from dlrm_overlap.bench.harness.forward import measure_forward
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.bench.request import ForwardRequest
from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.train.ranks import Ranks

_SLICE_BAGS = (4, 8, 16, 32, 64, 128)


def run(request: ForwardRequest, ranks: Ranks) -> int:
    """Measure the figure on all ranks, which all call this, and return the exit code of `measure_forward`."""
    return measure_forward(request, ranks, _make_contenders)


def _make_contenders(config: EmbeddingConfig, workload: Workload) -> list[Contender]:
    sliced = [workload.exchange_options(config, name) for name, backend in BACKENDS.items() if backend.has_slices]
    put = "stores" if config.put == "auto" else config.put
    variants = [replace(options, put=put, slice_bags=bags) for options in sliced for bags in _SLICE_BAGS]
    options = [workload.exchange_options(config, "pgas"), *variants]
    return [Baseline(workload), *(Overlap(workload, variant) for variant in options)]
