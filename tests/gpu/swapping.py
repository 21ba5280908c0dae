"""Kernels that swap rows, in turns, alone and in the step: `torchrun --nproc-per-node 1 -m tests.gpu.swapping`.

Of MLPerf's step with a cache of a tenth of the six largest tables' rows, under each of `--variants`: programs, warps
each, KB that a program moves at a time, stages and, if they are bounded, registers of a thread, such as 4x8x16x4 or
132x1x1x3x32; `own` is as the code has them, whose programs depend on the rows. Columns: rows of a step swapped alone,
which came and left, came only and left only, in GB/s each way; the median step; and, in a step, the time of the kernels
that swap. Then the kernels whose time in a step differs most between tables on the device and, under the first variant,
cached ones. `--ids uniform` has more rows in a step.
Options are those of `dlrm-overlap train`.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.cache import RowCache
from dlrm_overlap.kernels import swap_rows
from dlrm_overlap.kernels.arguments import Swaps
from dlrm_overlap.kernels.compiled import specialised
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.launching.text_table import format_table
from dlrm_overlap.observe.metrics import StepTimer
from dlrm_overlap.train.ranks import Ranks, run_on_ranks
from dlrm_overlap.train.trainer import Trainer
from tests.gpu.caching import _TIME, _caches, _copy_rates, _kernels_ms, _largest_cached, _uniform, _with

_VARIANTS = {
    "skewed": "16x8x16x1 own 2x8x16x6 2x16x32x4 4x8x16x3 4x8x16x4 4x8x16x6 4x16x32x4 4x32x64x1 6x8x16x4 8x8x16x4",
    "uniform": "16x8x16x1 64x8x16x1 own 8x8x16x4 16x8x16x4 32x8x16x4 64x8x16x3 8x32x64x1",
}
_FILLING, _WARMUP, _STEPS = 40, 10, {"skewed": 40, "uniform": 16}
_ALONE = 4
_KERNELS = 15


def _as_variant(name: str) -> AbstractContextManager[Any]:
    """Return a context in which the kernel is compiled and launched so."""
    if name == "own":
        return ExitStack()
    programs, warps, kilobytes, stages, *registers = map(int, name.split("x"))
    return patch.multiple(
        swap_rows,
        specialised=partial(specialised, registers=registers[0] if registers else None),
        _PROGRAMS=programs,
        _FEWEST=programs,
        _NUM_WARPS=warps,
        _BLOCK_WORDS=kilobytes * 256,
        _STAGES=stages,
    )


def _steps_ms(trainer: Trainer, batches: Iterator[Batch], steps: int) -> list[float]:
    """Return the time of each of some steps, captured anew."""
    trainer.step(batches)  # before the first one, there is nothing to forget
    pipeline: Any = trainer.pipeline
    pipeline._ahead.forget_sent_ids()
    pipeline._forget_captured()
    for _ in range(_WARMUP):
        trainer.step(batches)
    timer = StepTimer(trainer.device)
    timer.mark()
    for _ in range(steps):
        trainer.step(batches)
        timer.mark()
    return timer.take_ms()


def _swaps(cache: RowCache, rows: int) -> Swaps:
    """Return the swaps of slots side by side, as the hand takes them, for rows that are not in the cache, ascending."""
    row_in, device = cache._state.row_in, cache._state.row_in.device
    slots = (row_in >= 0).nonzero().flatten()[:rows]
    absent = torch.ones(cache.homes[0].shape[0], dtype=torch.bool, device=device)
    absent[row_in[row_in >= 0]] = False
    entering = absent.nonzero().flatten()
    entering = entering[torch.randperm(entering.numel(), device=device)[: slots.numel()]].sort().values
    count = torch.tensor([min(slots.numel(), entering.numel())], device=device)
    return Swaps(slots, row_in[slots], entering, count)


def _gb_per_s(swap: Callable[[Swaps], None], turns: list[Swaps], row_bytes: int) -> float:
    """Return the rate each way of swaps that leave the rows as they were."""
    for swaps in turns:
        swap(swaps)
    timer = StepTimer(turns[0].count.device)
    timer.mark()
    for _ in range(_ALONE):
        for swaps in turns:
            swap(swaps)
    timer.mark()
    return sum(int(swaps.count) for swaps in turns) * _ALONE * row_bytes / sum(timer.take_ms()) / 1e6


def _alone(cache: RowCache, rows: int) -> list[float]:
    """Return the rates of rows that enter and leave at once, that enter, and that leave."""
    there = _swaps(cache, rows)
    none = torch.full_like(there.leaving, -1)
    back = there._replace(leaving=there.entering, entering=there.leaving)
    stored, read = there._replace(entering=none), there._replace(leaving=none, entering=there.leaving)
    row_bytes = sum(each[0].nbytes for each in cache.rows)
    both, left, came = [_gb_per_s(cache.swap, turns, row_bytes) for turns in ([there, back], [stored], [read])]
    return [both, came, left]


def _compare(on_device: dict[str, float], cached: dict[str, float]) -> None:
    """Print the kernels whose time in a step differs most."""
    kernels = on_device | cached
    pairs = {kernel: (on_device.get(kernel, 0.0), cached.get(kernel, 0.0)) for kernel in kernels}
    lines = [["kernel", "on the device, ms", "cached, ms", "more, ms"]]
    for kernel in sorted(pairs, key=lambda kernel: -abs(pairs[kernel][1] - pairs[kernel][0]))[:_KERNELS]:
        one, other = pairs[kernel]
        lines.append([kernel[:90], f"{one:.3f}", f"{other:.3f}", f"{other - one:+.3f}"])
    print(format_table(lines))


def _time(ranks: Ranks) -> int:
    begin, ids, steps = time.monotonic(), ranks.values.ids, _STEPS[ranks.values.ids]
    variants: list[str] = ranks.values.variants or _VARIANTS[ids].split()
    config = _with(ranks.config if ids == "skewed" else _uniform(ranks.config), backend="pgas")
    trainers = [ranks.trainer(config), ranks.trainer(_largest_cached(config))]
    taken: dict[str, list[float]] = {name: [] for name in ("on the device", *variants)}
    rates: dict[str, list[float]] = {}
    kernels_ms: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        loaders = [stack.enter_context(each.loader(each.train_data, 0, 100_000)) for each in trainers]
        plain, cached = map(iter, loaders)
        _steps_ms(trainers[1], cached, _FILLING)
        caches = _caches(trainers[1])
        before = [int(cache.brought) for cache in caches]
        _steps_ms(trainers[1], cached, steps)
        came = [(int(c.brought) - b) // (steps + _WARMUP + 1) for c, b in zip(caches, before, strict=True)]
        rows, number = max(zip(came, range(len(caches)), strict=True))
        print(f"{time.monotonic() - begin:.0f} s: {came} rows a step of {len(caches)} caches", flush=True)
        for turn in range(2):
            taken["on the device"] += _steps_ms(trainers[0], plain, steps)
            if turn == 1:
                kernels_ms["on the device"] = _kernels_ms(partial(trainers[0].step, plain))
            for name in variants:
                if time.monotonic() - begin > ranks.values.seconds:
                    break
                with _as_variant(name):
                    taken[name] += _steps_ms(trainers[1], cached, steps)
                    if turn == 0:
                        rates[name] = _alone(caches[number], rows)
                    else:
                        kernels_ms[name] = _kernels_ms(partial(trainers[1].step, cached))
    base = statistics.median(taken["on the device"])
    lines = [["variant", "both", "came", "left", "step ms", "over", "swapping ms"]]
    for name, times in taken.items():
        if times:
            alone = [f"{rate:.1f}" for rate in rates[name]] if name in rates else ["-"] * 3
            swapping = f"{kernels_ms[name].get('_swap_rows', 0.0):.2f}" if name in kernels_ms else "-"
            step_ms = statistics.median(times)
            lines.append([name, *alone, f"{step_ms:.3f}", f"{step_ms / base:.3f}", swapping])
    print(f"{ids} ids\n{format_table(lines)}")
    if variants[0] in kernels_ms:
        _compare(kernels_ms["on the device"], kernels_ms[variants[0]])
    copies = {name: round(rate, 1) for name, rate in _copy_rates().items()}
    print(f"copies of page-locked memory, GB/s: {copies}; {time.monotonic() - begin:.0f} s", flush=True)
    for trainer in trainers:
        trainer.close()
    return 0


def main() -> int:
    """Time the variants that the options name."""

    def add_options(parser: Parser) -> None:
        parser.add_argument("--ids", choices=[*_VARIANTS], default="skewed", help="the configuration's, or uniform")
        parser.add_argument("--variants", nargs="+", default=[], help="as 4x8x16x4, or own")
        parser.add_argument("--seconds", type=float, default=65.0, help="after which no variant is begun")

    options = [*_TIME, "--train.pipeline", "graph", "--log.tensorboard", "false", *sys.argv[1:]]
    return run_on_ranks(["train"], __doc__ or "", options, _time, add_options)


if __name__ == "__main__":
    sys.exit(main())
