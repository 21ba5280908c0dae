"""Tables in the host's memory with a cache of rows on the GPU: `torchrun --nproc-per-node 1 -m tests.gpu.caching`.

`--part check` trains every optimizer with tables on the device, with a cache of two steps' ids and with one of all
rows, through evaluations, states that are read and written to between two steps, and a save that is loaded; losses and
states must have the same bits. `--part time` prints, of MLPerf's step on this many GPUs, a step's time with the tables
on the device, with a cache of a tenth of the six largest ones' rows, and with FBGEMM's cache in TorchRec's
`PrefetchTrainPipelineSparseDist`; with ids of the skew in the configuration, and uniform; the rows that came in a step,
the rate at which they did, and that of a copy of page-locked memory. `--ids` takes one of the two streams of ids alone;
`tests/gpu/swapping.py` times the kernel that swaps rows. Options are those of `dlrm-overlap train`.
"""

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.observe.metrics import StepTimer
from dlrm_overlap.train.preflight import _ON_CPUS
from dlrm_overlap.train.ranks import Ranks, run_on_ranks
from dlrm_overlap.train.trainer import Trainer
from tests.gpu.one_gpu import run_parts

_CHECK = ["--config", "configs/quickstart.yaml", "--embedding.backend", "pgas", "--train.pipeline", "graph"]
_CHECK += ["--train.steps", "200", "--train.batch_size", "64", "--data.eval_samples", "512"]
_TIME = ["--config", "configs/bench/step_mlperf.yaml", "--data.distinct_steps", "64", "--train.steps", "1000"]
_CACHED_TABLES = 6
_KERNELS = "_look_up", "_count", "_list", "_take", "_replace", "_swap_rows"
_TURN = 9  # steps: three before the captures, two captured, and replays of each graph
_WARMUP_STEPS, _STEPS = 40, 100


def _with(config: Config, **keys: Any) -> Config:
    return replace(config, embedding=replace(config.embedding, **keys))


def _batches(trainer: Trainer, step: int) -> Iterator[Batch]:
    size = trainer.samples_per_rank
    for each in count(step):
        yield trainer.train_data.read((each * trainer.world.world_size + trainer.world.rank) * size, size)


def _rows(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return this rank's rows and their optimizer's states, which are those of the tables themselves."""
    extents = extents_to_store(trainer.model, trainer.optimizer)
    return {f"{extent.stored_name} {extent.offsets}": extent.tensor for extent in extents}


def _same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
    for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours, plain), f"{what}: step {number}: {ours.tolist()}, without a cache {plain.tolist()}"


def _same_rows(found: Trainer, expected: Trainer) -> None:
    ours, plain = _rows(found), _rows(expected)
    assert ours.keys() == plain.keys()
    unlike = [name for name, rows in plain.items() if not torch.equal(ours[name], rows)]
    assert not unlike, f"other bits without a cache: {', '.join(unlike)}"


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
        assert all(cache.slots < cache.homes[0].shape[0] for cache in _caches(small))
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
    for trainer, stream in ((plain, streams[0]), (whole, streams[2])):  # of which steps the load leaves the count alone
        train(trainer, stream, 3)
        trainer.pipeline.reset()
        checkpointer.load(Path(folder[0]) / f"step_{3 * _TURN}", trainer.model, trainer.optimizer)
    expected, found = (train(trainer, _batches(trainer, 3 * _TURN), _TURN) for trainer in (plain, whole))
    _same(found, expected, "from the save")
    _same_rows(whole, plain)
    dist.barrier()
    for trainer in trainers:
        trainer.close()


def _time(ranks: Ranks, config: Config) -> dict[str, float]:
    """Return the time of a step, and what came to the caches in one."""
    trainer = ranks.trainer(config)
    with trainer.loader(trainer.train_data, 0, 10 * _STEPS) as loader:
        batches = iter(loader)
        for _ in range(_WARMUP_STEPS):
            trainer.step(batches)
        torch.cuda.synchronize()
        caches = _caches(trainer)
        before, timer = [int(cache.brought) for cache in caches], StepTimer(trainer.device)
        begin = time.perf_counter()
        timer.mark()
        for _ in range(_STEPS):
            loss = trainer.step(batches)
            timer.mark()
        torch.cuda.synchronize()
        took_ms = (time.perf_counter() - begin) * 1e3 / _STEPS
        came = [(int(c.brought) - b) / _STEPS for c, b in zip(caches, before, strict=True)]
        of_loss = float(loss)
        taken = _kernels_ms(partial(trainer.step, batches)) if caches else {}
    row_bytes = [sum(rows[0].nbytes for rows in cache.rows) for cache in caches]
    found = {
        "mean_ms": took_ms,
        "median_ms": statistics.median(timer.take_ms()),
        "slots": sum(cache.slots for cache in caches),
        "rows_brought": sum(came),
        "gb_each_way": sum(n * size for n, size in zip(came, row_bytes, strict=True)) / 1e9,
        "loss": of_loss,
        "gpu_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    found["gb_per_s_each_way"] = found["gb_each_way"] / found["mean_ms"] * 1e3
    found |= {f"{name.strip('_')}_ms": taken[name] for name in _KERNELS if name in taken}
    trainer.close()
    del trainer, batches, loader, caches, loss
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return found


def _caches(trainer: Trainer) -> list[RowCache]:
    return [cache for each in exchanges(trainer.model) for cache, _ in each.tables._cached_features]


def _kernels_ms(step: Callable[[], Any]) -> dict[str, float]:
    """Return the time in each kernel, in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(4):
            step()
        torch.cuda.synchronize()
    return {each.key: each.self_device_time_total / 4e3 for each in profile.key_averages()}


def _copy_rates() -> dict[str, float]:
    """Return GB/s of copies of 1 GB of page-locked memory: to the device, from it, and of each way with both."""
    host = [torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    ways = {"to": [(device[0], host[0])], "from": [(host[1], device[1])]}
    rates = {}
    for name, pairs in (ways | {"both": ways["to"] + ways["from"]}).items():
        taken = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for stream, (target, source) in zip(streams, pairs, strict=False):
                with torch.cuda.stream(stream):
                    for _ in range(4):
                        target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - begin)
        rates[name] = 4 * (1 << 30) / 1e9 / statistics.median(taken)
    return rates


def _largest_cached(config: Config) -> Config:
    """Return the configuration with a cache of a tenth of the largest tables' rows."""
    rows = config.data.tables.rows
    assert isinstance(rows, list)
    largest = sorted(range(len(rows)), key=lambda table: -rows[table])[:_CACHED_TABLES]
    memory = ["cached" if table in largest else "gpu" for table in range(len(rows))]
    return _with(config, memory=memory, cache_fraction=0.1)


def _uniform(config: Config) -> Config:
    """Return the configuration with uniform ids."""
    tables = replace(config.data.tables, zipf_alpha=0.0)
    return replace(config, data=replace(config.data, tables=tables))


def _time_all(ranks: Ranks) -> None:
    found: dict[str, dict[str, float]] = {}
    for ids, config in (("skewed", ranks.config), ("uniform", _uniform(ranks.config))):
        if ranks.values.ids not in (None, ids):
            continue
        ours = _with(config, backend="pgas")
        contenders = {"on the device": ours, "cached": _largest_cached(ours)}
        contenders["FBGEMM's cache"] = _largest_cached(_with(config, backend="torchrec"))
        for name, each in contenders.items():
            try:
                found[f"{ids}, {name}"] = _time(ranks, each)
                if dist.get_rank() == 0:
                    rounded = {key: round(value, 4) for key, value in found[f"{ids}, {name}"].items()}
                    print(f"{ids}, {name}: {json.dumps(rounded)}", flush=True)
            except Exception as error:  # one that runs out of memory leaves the others to be timed
                print(f"{ids}, {name}: {type(error).__name__}: {error}"[:600], flush=True)
    if dist.get_rank():
        return
    rates = _copy_rates()
    print("copies of page-locked memory, GB/s:", json.dumps({name: round(rate, 2) for name, rate in rates.items()}))
    for text, over, under in (
        ("cached over on the device (at most 1.15)", "skewed, cached", "skewed, on the device"),
        ("FBGEMM's over cached (at least 2)", "skewed, FBGEMM's cache", "skewed, cached"),
        ("FBGEMM's over cached, uniform", "uniform, FBGEMM's cache", "uniform, cached"),
    ):
        if over in found and under in found:
            print(f"{text}: {found[over]['median_ms'] / found[under]['median_ms']:.3f}")
    if (cached := found.get("uniform, cached")) is not None:
        print(f"uniform, rate over that of copies both ways (0.85): {cached['gb_per_s_each_way'] / rates['both']:.3f}")


def work(ranks: Ranks) -> int:
    """Run a part on this rank."""
    if ranks.values.part == "time":
        _time_all(ranks)
        return 0
    known = get_args(TableOptimizer) if ranks.device.type == "cuda" else _ON_CPUS
    return run_parts({name: partial(_check, ranks, name) for name in known})


def main() -> int:
    """Add to the options what each part has."""

    def add_options(parser: Parser) -> None:
        parser.add_argument("--part", choices=["check", "time"], default="check", help="what is run")
        parser.add_argument("--ids", choices=["skewed", "uniform"], help="of time: these ids alone")

    options = sys.argv[1:]
    given = _TIME if "time" in options else _CHECK
    return run_on_ranks(["train"], __doc__ or "", [*given, "--log.tensorboard", "false", *options], work, add_options)


if __name__ == "__main__":
    sys.exit(main())
