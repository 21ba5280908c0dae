"""What all contenders of the forward work on."""

from dataclasses import replace

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.workload import make_workload, read_ids
from dlrm_overlap.config import Config


def test_torchrec_sends_the_type_that_the_exchanges_send(config: Config, world_of_one: dist.ProcessGroup) -> None:
    """Where a dense part in bf16 has chosen it. FBGEMM delivers float32 on CPUs, so TorchRec casts around the wire."""
    sparse, device = read_ids(config, world_of_one), torch.device("cpu")
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        of_dense = replace(config, train=replace(config.train, precision=precision))
        workload = make_workload(of_dense, sparse, world_of_one, device, 1)
        assert workload.wire_dtype == dtype
        assert bool(workload.module.qcomm_codecs_registry) == (dtype == torch.bfloat16)
