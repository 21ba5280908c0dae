"""How long the host takes to issue eager training steps of three kinds: `python -m tests.gpu.host_backward --nproc 2`.

Tables sharded on one host; the same between emulated hosts, a rank each; and tables that every rank holds, beside one
of each rank's own. 8 tables of dim 256 a rank, 256 samples a rank, bags of up to 4 ids. First a few steps, of other
batch sizes and with gradients of parameters that move, end in a digest of what they have trained, alike for trees that
train alike. Then steps are timed, in medians of rank 0 in microseconds, one a round.
"""

import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.id_layout import BatchBound
from dlrm_overlap.embedding.layout import EVERY_RANK, FeatureShard, Layout
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.launching.launcher import World
from dlrm_overlap.observe.metrics import quantile
from tests.gpu.exchange.place import Place
from tests.gpu.exchange.stage_by_hand import Batch, Stage, Table
from tests.gpu.measuring import Say, measure_on_gpus

_BATCHES, _ROUNDS, _STEPS, _DRAINED = 8, 3, 200, 8
_SAMPLES, _DIM, _TABLES, _ROWS, _IDS = 256, 256, 8, 20_000, 4


class _Sharded:
    """Tables of each rank, on one host or on emulated ones."""

    def __init__(self, place: Place, hosts: int) -> None:
        self.place, ranks = place, range(place.world_size)
        torch.manual_seed(7)
        self._tables = [Table(_ROWS, _DIM, owner, longest=_IDS) for owner in ranks for _ in range(_TABLES)]
        self._stage = Stage(place, self._tables, lr=0.1, optimizer="sgd")
        self._stage.fill(integers=False)
        options = ExchangeOptions(backend="pgas", backward="push", hosts=hosts, between_hosts="messages")
        self.exchange, self.width = self._stage.exchange(options), _DIM * len(self._tables)
        even, uneven = (_SAMPLES,) * place.world_size, tuple(100 + 7 * rank for rank in ranks)
        sizes = [even, uneven, even, uneven, *[even] * (_BATCHES - 4)]
        self._batches = [Batch(place, self._tables, each, i, torch.int64) for i, each in enumerate(sizes)]

    def start(self, number: int) -> Any:
        batch = self._batches[number]
        return self.exchange.start(self._stage.inputs(batch), batch.sizes)

    def samples(self, number: int) -> int:
        return self._batches[number].sizes[self.place.rank]

    def trained(self) -> list[torch.Tensor]:
        return [self._stage.weight(t) for t, table in enumerate(self._tables) if table.owner == self.place.rank]


class _DataParallel:
    """Tables that every rank holds, of sums and of means, beside one table of each rank's own."""

    def __init__(self, place: Place) -> None:
        self.place, ranks = place, range(place.world_size)
        torch.manual_seed(7)
        tables = [Table(_ROWS, _DIM, owner, longest=_IDS) for owner in ranks]
        self._stage = Stage(place, tables, lr=0.1, optimizer="sgd")
        self._stage.fill(integers=False)
        half = _TABLES // 2
        self._lookups: list[Any] = [
            DenseTableBatchedEmbeddingBagsCodegen([(_ROWS, _DIM)] * half, pooling_mode=kind, use_cpu=not place.on_gpu)
            for kind in (PoolingMode.SUM, PoolingMode.MEAN)
        ]
        for lookup in self._lookups:
            lookup.weights.data = lookup.weights.data.to(place.device)
            lookup.weights.grad = torch.zeros_like(lookup.weights)
        shards = []
        for i in range(_TABLES):
            where = EVERY_RANK, 0, i, i // half, i % half, 0
            shards.append(FeatureShard(f"d{i}", *where, _DIM, bool(i // half), torch.float32, f"d{i}"))
        names = [*(f"t{rank}" for rank in ranks), *(shard.name for shard in shards)]
        layout = Layout([*(self._stage._piece_of[t] for t in ranks), *shards], names, place.world_size)
        self.exchange, self.width = self._stage.exchange(ExchangeOptions("pgas", backward="push")), _DIM * len(names)
        bound = BatchBound(_SAMPLES, dict.fromkeys(names, (_IDS, _IDS)))
        fatal = [BoundsCheckMode.FATAL] * len(self._lookups)
        self.exchange.take_ids(names, bound, layout, ReplicatedTables(self._lookups, fatal))
        lengths = torch.full((len(names) * _SAMPLES,), _IDS, device=place.device, dtype=torch.int32)
        self._inputs = []
        for number in range(_BATCHES):
            generator = place.generator(1000 + number + 50 * place.rank)
            values = torch.randint(0, _ROWS, (len(lengths) * _IDS,), device=place.device, generator=generator)
            self._inputs.append(KeyedJaggedTensor(names, values.int(), lengths=lengths))

    def start(self, number: int) -> Any:
        if number == 2:  # gradients that are elsewhere from here on
            for lookup in self._lookups:
                lookup.weights.grad = lookup.weights.grad.clone()
        return self.exchange.start_sent(self._inputs[number])

    def samples(self, number: int) -> int:
        return _SAMPLES

    def trained(self) -> list[torch.Tensor]:
        return [*(lookup.weights.grad for lookup in self._lookups), self._stage.weight(self.place.rank)]


def _gradient(place: Place, number: int, width: int, samples: int) -> torch.Tensor:
    return torch.randn(samples, width, device=place.device, generator=place.generator(number + 90 * place.rank))


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:12]


def _run(place: Place, name: str, kind: _Sharded | _DataParallel, say: Say) -> None:
    with torch.enable_grad():
        for number in range(_BATCHES):
            kind.start(number).wait().backward(_gradient(place, number, kind.width, kind.samples(number)))
    place.synchronize()
    kind.exchange.check()
    digests: list[Any] = [None] * place.world_size
    dist.all_gather_object(digests, _digest(kind.trained()))
    say(f"{name}: digests {' '.join(digests)}")
    gradient = _gradient(place, 0, kind.width, _SAMPLES)
    for _ in range(_ROUNDS):
        place.meet()
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(_STEPS):
            moments = [time.perf_counter_ns()]
            with torch.enable_grad():
                pooled = kind.start(4 + number % 4).wait()
                moments.append(time.perf_counter_ns())
                pooled.backward(gradient)
            moments.append(time.perf_counter_ns())
            del pooled
            for each, begin, end in zip(times, moments, moments[1:], strict=False):
                each.append((end - begin) / 1e3)
            if number % _DRAINED == _DRAINED - 1:
                place.synchronize()
        forward, backward = (quantile(each, 0.5) for each in times)
        say(f"{name}: forward {forward:.1f} us, backward {backward:.1f} us")
    place.meet()
    kind.exchange.check()
    kind.exchange.close()


def _measure(world: World, device: torch.device, say: Say) -> None:
    assert dist.group.WORLD is not None
    place = Place(world, dist.group.WORLD, device, Path())
    _run(place, "one host", _Sharded(place, 1), say)
    _run(place, "a host a rank", _Sharded(place, world.world_size), say)
    _run(place, "data-parallel", _DataParallel(place), say)


if __name__ == "__main__":
    sys.exit(measure_on_gpus("tests.gpu.host_backward", __doc__, _measure))
