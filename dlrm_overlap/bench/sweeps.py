"""Who takes part in which benchmark."""

from dataclasses import replace

import torch

from dlrm_overlap.bench.contenders import Baseline, Contender, Overlap, TorchRec
from dlrm_overlap.bench.workload import Workload, exchange_options
from dlrm_overlap.config import EmbeddingConfig, InputError
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.kernels.schedule import SCHEDULES

_SLICE_BAGS = (4, 8, 16, 32, 64, 128)


def make_contenders(kind: str, config: EmbeddingConfig, workload: Workload) -> list[Contender]:
    """Return who takes part in the benchmark `kind`, the baseline first."""
    options = {backend: exchange_options(config, backend) for backend in ("nccl", "pgas", "fused")}
    baseline = Baseline(workload)
    if kind == "slice":
        variants = [options["pgas"], *(replace(options["fused"], slice_bags=bags) for bags in _SLICE_BAGS)]
    elif kind == "schedule":
        pairs = [(backend, schedule) for backend in ("pgas", "fused") for schedule in SCHEDULES]
        variants = [replace(options[backend], schedule=schedule) for backend, schedule in pairs]
    elif kind == "occupancy":
        return [baseline, *_by_occupancy(workload, options["fused"])]
    else:
        variants = list(options.values())
        if kind == "stage":  # and what the drop-in returns unless it is told otherwise
            variants.append(replace(options["pgas"], copy_output=True))
        return [baseline, TorchRec(workload), *(Overlap(workload, variant) for variant in variants)]
    return [baseline, *(Overlap(workload, variant) for variant in variants)]


@torch.no_grad()
def _by_occupancy(workload: Workload, options: ExchangeOptions) -> list[Overlap]:
    """Return fused with 1, 2, 4, .. programs a multiprocessor as far as they fit, and with all that fit."""
    found: list[Overlap] = []
    while True:
        contender = Overlap(workload, replace(options, programs_per_sm=2 ** len(found)))
        try:
            contender.step(workload.batches[0])
        except InputError:  # more than fit, on every rank alike
            contender.close()
            if not found:
                raise
            return [*found, Overlap(workload, replace(options, programs_per_sm=None))]
        found.append(contender)
