"""Tables in the host's memory with a cache of rows on the GPU: `torchrun --nproc-per-node 1 -m tests.gpu.caching`.

It trains with every optimizer with tables on the device, with a cache of two steps' ids, and with a cache of all rows,
through evaluations, reads and writes of states between two steps, and a checkpoint that is loaded. Losses and states
must have the same bits. Options are those of `dlrm-overlap train`.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store
from dlrm_overlap.config import Config, TableOptimizer
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.cache import RowCache
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.train.ranks import _ON_CPUS, Ranks, run_on_ranks
from dlrm_overlap.train.trainer import Trainer
from tests.gpu.one_gpu import run_parts

_CHECK = ["--config", "configs/quickstart.yaml", "--embedding.backend", "pgas", "--train.pipeline", "graph"]
_CHECK += ["--train.steps", "200", "--train.batch_size", "64", "--data.eval_samples", "512"]
_TURN = 9  # steps: three before the captures, two captured, and replays of each graph


def _with(config: Config, **keys: Any) -> Config:
    return replace(config, embedding=replace(config.embedding, **keys))


def _batches(trainer: Trainer, step: int) -> Iterator[Batch]:
    size = trainer.samples_per_rank
    for each in count(step):
        yield trainer.train_data.read((each * trainer.world.world_size + trainer.world.rank) * size, size)


def _rows(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return this rank's rows and their optimizer's states; no copies."""
    extents = extents_to_store(trainer.model, trainer.optimizer)
    return {f"{extent.stored_name} {extent.offsets}": extent.tensor for extent in extents}


def _same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
    for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours, plain), f"{what}: step {number}: {ours.tolist()}, without a cache {plain.tolist()}"


def _same_rows(found: Trainer, expected: Trainer) -> None:
    ours, plain = _rows(found), _rows(expected)
    assert ours.keys() == plain.keys()
    different = [name for name, rows in plain.items() if not torch.equal(ours[name], rows)]
    assert not different, f"other bits without a cache: {', '.join(different)}"


def _check(ranks: Ranks, optimizer: Any) -> None:
    lr = 0.005 if "adam" in optimizer or "lamb" in optimizer else 0.05
    config = _with(ranks.config, optimizer=optimizer, lr=lr)
    cached = _with(config, memory="cached", cache_fraction=0.001)
    plain, small, whole = trainers = [ranks.trainer(each) for each in (config, cached, _with(cached, cache_fraction=1))]
    streams = [_batches(trainer, 0) for trainer in trainers]

    def train(trainer: Trainer, stream: Iterator[Batch], steps: int) -> list[torch.Tensor]:
        return [trainer.step(stream).clone() for _ in range(steps)]

    for turn in range(3):
        expected, *others = [train(*each, _TURN) for each in zip(trainers, streams, strict=True)]
        for losses in others:
            _same(losses, expected, f"turn {turn}")
        for exchange in exchanges(small.model) + exchanges(whole.model):
            assert exchange.tables._cached_features, "no table is cached"
        assert all(cache.slots < cache.host_rows[0].shape[0] for cache in _caches(small))
        for trainer in (small, whole):
            _same_rows(trainer, plain)
        if turn == 0:  # with ids sent ahead
            for trainer in trainers:
                for name, rows in _rows(trainer).items():
                    if rows.dim() == 2 and "embedding" in name:
                        rows.mul_(0.5)
        if turn == 1:
            losses = [torch.tensor(trainer.evaluate()["loss"]) for trainer in trainers]
            _same(losses[1:], losses[:1] * 2, "held-out loss")
            for number, trainer in enumerate(trainers):
                trainer.pipeline.reset()
                streams[number] = _batches(trainer, 2 * _TURN)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    checkpointer = Checkpointer(Path(folder[0]), keep=1, shape={})
    checkpointer.write(3 * _TURN, extents_to_store(small.model, small.optimizer))
    for trainer, stream in (
        (plain, streams[0]),
        (whole, streams[2]),
    ):  # the load undoes these steps
        train(trainer, stream, 3)
        trainer.pipeline.reset()
        checkpointer.load(Path(folder[0]) / f"step_{3 * _TURN}", trainer.model, trainer.optimizer)
    expected, found = (train(trainer, _batches(trainer, 3 * _TURN), _TURN) for trainer in (plain, whole))
    _same(found, expected, "from the save")
    _same_rows(whole, plain)
    dist.barrier()
    for trainer in trainers:
        trainer.close()


def _caches(trainer: Trainer) -> list[RowCache]:
    return [cache for each in exchanges(trainer.model) for cache, _ in each.tables._cached_features]


def work(ranks: Ranks) -> int:
    known = get_args(TableOptimizer) if ranks.device.type == "cuda" else _ON_CPUS
    return run_parts({name: partial(_check, ranks, name) for name in known})


if __name__ == "__main__":
    options = [*_CHECK, "--log.tensorboard", "false", *sys.argv[1:]]
    sys.exit(run_on_ranks(["train"], str(__doc__), options, work))
