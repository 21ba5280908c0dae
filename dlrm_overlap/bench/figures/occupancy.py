"""`bench occupancy`: how many programs of the persistent kernel should a multiprocessor run?

Contenders: the baseline, and every backend that has slices, with 1, 2, 4, .. programs on each multiprocessor of the GPU
as far as they fit, then with as many as fit, all with the configuration's put. No extra column: `programs_per_sm` is a
column of every figure of the forward. A CPU has no multiprocessors, so the figure needs GPUs.
"""

from dataclasses import replace

import torch

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.bench.harness.contenders import Baseline, Contender, Overlap
from dlrm_overlap.bench.harness.forward import measure_forward
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.bench.request import OccupancyRequest
from dlrm_overlap.config import EmbeddingConfig, InputError
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.train.ranks import Ranks


def run(request: OccupancyRequest, ranks: Ranks) -> int:
    """Measure the figure on all ranks, which all call this, and return the exit code of `measure_forward`."""
    return measure_forward(request, ranks, _make_contenders)


def _make_contenders(config: EmbeddingConfig, workload: Workload) -> list[Contender]:
    contenders: list[Contender] = [Baseline(workload)]
    for name, backend in BACKENDS.items():
        if backend.has_slices:
            contenders += _by_occupancy(workload, workload.exchange_options(config, name))
    return contenders


@torch.no_grad()
def _by_occupancy(workload: Workload, options: ExchangeOptions) -> list[Overlap]:
    """Return a backend with 1, 2, 4, .. programs a multiprocessor as far as they fit, and with as many as fit.

    Each is tried by a step, so all ranks must call this.

    Raises:
        InputError: if not even one program fits.
    """
    found: list[Overlap] = []
    while True:
        contender = Overlap(workload, replace(options, programs_per_sm=2 ** len(found)))
        try:
            contender.step(workload.batches[0])
        except InputError:  # more than fit; every rank raises it, since their GPUs are alike
            contender.close()
            if not found:
                raise
            return [*found, Overlap(workload, replace(options, programs_per_sm=None))]
        found.append(contender)
