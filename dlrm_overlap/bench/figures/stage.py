"""`bench stage`: how long does the embedding stage's forward take under every backend, on one shape?

Contenders: the baseline; the same in 2, 4 and 8 chunks of tables, so that NCCL sends one while FBGEMM looks up the next
(`nccl_chunked_2` and so on, as far as every rank has so many tables); TorchRec's own path; every backend whose exchange
is ours; on GPUs `fused` once more for each other put, such as `fused_stores`; and `pgas` once
more, which returns a copy of its window, as the drop-in does unless it is asked not to. Under
`--embedding.hosts N` also `pgas` and `fused` between N emulated hosts, whose messages go over the links of this one, by
NCCL and, where NVSHMEM is there, by puts: that shows the cost of either beside stores, not that of a network. No extra
column.
"""

import logging
from dataclasses import replace
from functools import partial

from dlrm_overlap.backends import EXCHANGED
from dlrm_overlap.bench.harness.chunked import make_chunked
from dlrm_overlap.bench.harness.contenders import Baseline, Contender, Overlap, TorchRec
from dlrm_overlap.bench.harness.forward import measure_forward
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.bench.request import EveryoneRequest
from dlrm_overlap.comm.network import missing_puts
from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.embedding.options import PUTS
from dlrm_overlap.train.ranks import Ranks

log = logging.getLogger("dlrm_overlap")


def run(request: EveryoneRequest, ranks: Ranks) -> int:
    """Measure the figure on all ranks, which all call this, and return the exit code of `measure_forward`."""
    return measure_forward(request, ranks, partial(make_contenders, request))


def make_contenders(request: EveryoneRequest, config: EmbeddingConfig, workload: Workload) -> list[Contender]:
    """Return who takes part, the baseline first."""
    hosts, config = config.hosts, replace(config, hosts="auto")
    fused = workload.exchange_options(config, "fused")
    puts = [put for put in PUTS if put != fused.resolved_put]
    if workload.device.type == "cpu":
        names = ", ".join(f"fused_{put}" for put in puts)
        log.info("stage: %s: left out, since processes on CPUs have one way to put a slice", names)
        puts = []
    by_put = [replace(fused, put=put) for put in puts]
    copied = replace(workload.exchange_options(config, "pgas"), copy_output=True)
    carriers = ("messages",) if workload.device.type == "cpu" or missing_puts() else ("messages", "puts")
    emulated = [
        replace(workload.exchange_options(config, backend), hosts=hosts, between_hosts=carrier)
        for backend in ("pgas", "fused")
        for carrier in carriers
        if isinstance(hosts, int) and hosts > 1
    ]
    baseline, *backends = every_backend(config, workload)
    chunked = make_chunked(workload, request.chunks)
    variants = (*by_put, copied, *emulated)
    return [baseline, *chunked, *backends, *(Overlap(workload, options) for options in variants)]


def every_backend(config: EmbeddingConfig, workload: Workload) -> list[Contender]:
    """Return the baseline, TorchRec's own path, and every backend whose exchange is ours."""
    exchanges = [Overlap(workload, workload.exchange_options(config, backend)) for backend in EXCHANGED]
    return [Baseline(workload), TorchRec(workload), *exchanges]
