"""The command: `python -m tests.gpu.aggregate --nproc 2`: the stage between emulated hosts, by how puts are gathered.

Prints, for two batch sizes, how long a forward takes on one host, with messages by NCCL, and with puts for each
`aggregate_bytes` and `aggregate_us`: medians over rounds of the slowest rank's mean step, of steps that the host has
issued before they begin. Each output has to be that of one host, bit for bit. A host is one GPU, and messages go over
the links of one machine, so this tells what gathering costs and saves on the GPU, and nothing of a network.
"""

import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.timing import begin_together
from dlrm_overlap.comm.network import missing_puts
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.launching.launcher import World
from tests.gpu.exchange.place import Place
from tests.gpu.exchange.stage_by_hand import Batch, Stage, Table
from tests.gpu.measuring import Say, measure_on_gpus

SAMPLES = (1024, 8192)
TABLES, ROWS, DIM, LONGEST = 13, 100_000, 128, 16  # of a rank
BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
WAITS_US = (None, 20.0, 0.0)
_ROUNDS, _STEPS, _WARM_UP = 7, 20, 3
_ISSUED_MS = 15.0  # in which the host issues all steps of a round
_WAIT_S = 20.0


class _Measured:
    """One batch, and the output of one host."""

    def __init__(self, place: Place, stage: Stage, samples: int) -> None:
        self._place, self._stage = place, stage
        self._batch = Batch(place, stage.tables, [samples] * place.world_size, seed=samples)
        self._inputs = stage.inputs(self._batch)
        self._known: torch.Tensor | None = None

    def time_us(self, options: ExchangeOptions) -> str:
        """Return how long a step takes on the slowest rank, or that its output is another one."""
        exchange = self._stage.exchange(options)
        pooled = exchange.start(self._inputs, self._batch.sizes).wait()
        if self._known is None:
            self._known = pooled.clone()
        wrong = torch.tensor(float((pooled != self._known).sum()))
        dist.all_reduce(wrong)
        del pooled
        times = []
        for _ in range(_WARM_UP + _ROUNDS):
            begin_together(self._place.group, self._place.device, _ISSUED_MS)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(_STEPS):
                exchange.start(self._inputs, self._batch.sizes).wait()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / _STEPS)
        exchange._open().forward.check()
        self._place.meet()
        exchange.close()
        slowest = torch.tensor(times[_WARM_UP:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return f"{statistics.median(slowest.tolist()):8.1f}" if not wrong else f"{int(wrong)} wrong"


def measure(world: World, device: torch.device, say: Say) -> None:
    """Print the table."""
    assert dist.group.WORLD is not None
    place = Place(world, dist.group.WORLD, device, Path())
    tables = [Table(ROWS, DIM, owner, longest=LONGEST) for owner in range(place.world_size) for _ in range(TABLES)]
    stage = Stage(place, tables)
    stage.fill(integers=False)
    one = ExchangeOptions("pgas", wait_timeout_s=_WAIT_S, hosts=1)
    gpu = torch.cuda.get_device_name(place.device)
    say(f"{place.world_size} x {gpu}, {TABLES} tables of dim {DIM} a rank, us a step")
    for samples in SAMPLES:
        measured = _Measured(place, stage, samples)
        mb = samples * TABLES * DIM * 4 / 1e6
        say(f"{samples} samples a rank, {mb:.1f} MB a message: one host {measured.time_us(one)}")
        between = ExchangeOptions("pgas", wait_timeout_s=_WAIT_S, hosts=place.world_size, between_hosts="messages")
        say(f"messages by NCCL   {measured.time_us(between)}")
        if missing_puts():
            say(f"no puts: {missing_puts()}")
            continue
        say(f"{'puts, longest wait':18} " + " ".join(f"{size >> 10:5} KB" for size in BYTES))
        for wait_us in WAITS_US:
            row = [
                measured.time_us(
                    ExchangeOptions(
                        "pgas", wait_timeout_s=_WAIT_S, hosts=place.world_size, between_hosts="puts",
                        aggregate_bytes=size, aggregate_us=wait_us,
                    )
                )
                for size in BYTES
            ]  # fmt: skip
            say(f"{'any' if wait_us is None else f'{wait_us:g} us':18} " + " ".join(row))


if __name__ == "__main__":
    sys.exit(measure_on_gpus("tests.gpu.aggregate", __doc__, measure))
