"""Phrases of the pages are what the rows give: change a row, and a sentence is wrong.

A function of `PHRASES` computes them, in the pages' words, from the CSV files in `docs/results`. All numbers of the
paragraphs that lead are in `test_published_claims.py`.
"""

import math
import re
import runpy
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from tests.published import (
    Row,
    gemm_runs,
    gpu_speedups,
    ms_of,
    one_by_one,
    over,
    read,
    runs_of,
    serially,
    slowdown_of_few_rows,
)

FIGURES, SIMULATOR = "docs/figures.md", "docs/simulator.md"
STAGE, GEMM = "docs/results/stage.md", "docs/results/gemm.md"
ARCHITECTURE, STEP = "docs/architecture.md", "docs/architecture/step.md"
Phrases = Callable[[], Iterable[tuple[str, str]]]
PHRASES: list[Phrases] = []


def _phrases(function: Phrases) -> Phrases:
    PHRASES.append(function)
    return function


def _span(values: Iterable[float], spec: str, unit: str = "") -> str:
    values = list(values)
    return f"{min(values):{spec}} to {max(values):{spec}}{unit}"


def _times(values: Iterable[float]) -> str:
    return _span(values, ".2f", "x").replace(" to", "x to")


def _percent(values: Iterable[float]) -> str:
    return _span([100 * each for each in values], ".0f", "%")


@_phrases
def chapters() -> Iterable[tuple[str, str]]:
    strongest, captured = (ms_of(runs_of("step")[0][name]) for name in ("torchrec_strongest", "pgas_graph"))
    yield ARCHITECTURE, f"takes {strongest:.2f} ms under TorchRec at its strongest, and {captured:.2f} ms captured"
    once, twice = runs_of("strategies")
    for name, value in (("", "dma"), ("_stores", "stores"), ("_partition", "partition")):
        both = [f"{ms_of(run[f'pgas_graph{name}']):.3f}" for run in (once, twice) if f"pgas_graph{name}" in run]
        cell = f"{both[0]} ms" + "".join(f"; {each}" for each in both[1:])
        lines = [line for line in Path(STEP).read_text().splitlines() if line.startswith(f"| `{value}` | ")]
        assert len(lines) == 1
        assert lines[0].replace("with 16384 samples a GPU ", "").endswith(f" | {cell} |"), (lines[0], cell)
    ablation = runs_of("ablation")[-1]
    ours, nccl, replicated = (ms_of(ablation[f"pgas_graph{name}"]) for name in ("", "_collective", "_data_parallel"))
    yield STEP, f"{ours:.2f} ms, by NCCL {nccl:.2f}"
    yield STEP, f"MLPerf's step takes {replicated:.2f} ms instead of {ours:.2f} on 4 x H200"
    puts = next(run for run in runs_of("stage_two_gpus") if run["pgas"]["dim"] == "128")
    in_place, stores, copies = (f"{ms_of(puts[name]):.2f}" for name in ("fused", "fused_stores", "fused_dma"))
    yield STEP, f"{stores} ms there instead of {in_place}"
    yield STEP, f"takes {copies} ms there, where nothing else wants the multiprocessors"


@_phrases
def stage_on_two() -> Iterable[tuple[str, str]]:
    bf16 = [{name: ms_of(row) for name, row in run.items()} for run in runs_of("stage_two_gpus_bf16")]
    assert 0.99 <= bf16[3]["fused"] / bf16[3]["pgas"] <= 1.01, "as long as pgas"
    chunks = [min(ms for name, ms in run.items() if "chunked" in name) for run in bf16]
    pays = [run["baseline"] / least - 1 for run, least in zip(bf16, chunks, strict=True)]
    assert [gain > 0 for gain in pays] == [True, False, True, False, False]
    yield STAGE, f"on the first and the third shape, by {pays[0]:.0%} and {pays[2]:.0%}."
    for run, gain in zip(runs_of("stage_two_gpus_bf16"), pays, strict=True):
        assert (float(run["nccl_chunked_2"]["host_ms"]) > ms_of(run["baseline"])) == (gain < 0)


_SHAPE = ("dim", "global_batch", "pooling_factor")


def _strongest(shape: Mapping[str, Row], time: str) -> float:
    return min(float(row[time]) for row in shape.values() if row["is_baseline"] == "True")


def _over_strongest(shape: Mapping[str, Row], time: str) -> float:
    return _strongest(shape, time) / min(float(shape[name][time]) for name in ("pgas", "fused"))


@_phrases
def maps() -> Iterable[tuple[str, str]]:
    _, over = gpu_speedups("sweep")
    mean = f"{statistics.geometric_mean(over):.2f}"
    assert min(over) >= 1.05, "it pays on all shapes"
    yield (
        STAGE,
        f"{min(over):.2f}x to {max(over):.2f}x as fast as the strongest baseline, {mean}x in the geometric mean",
    )
    shapes = runs_of("sweep")
    issued = [_over_strongest(shape, "median_ms") for shape in shapes]
    yield STAGE, f"as the host issues it {_times(issued)}, since a step is"
    bags = {float(shape["pgas"]["pooling_factor"]): [] for shape in shapes}
    for shape in shapes:
        bags[float(shape["pgas"]["pooling_factor"])].append(_over_strongest(shape, "gpu_ms"))
    yield STAGE, f"**Most where bags are short:** {_times(bags[1] + bags[8])} at 1 and 8 ids a bag"
    yield STAGE, f"**Least where bags are long:** {_times(bags[128])} at 128 ids"
    stronger = {
        time: [gain for shape in shapes if (gain := float(shape["baseline"][time]) / _strongest(shape, time)) > 1]
        for time in ("gpu_ms", "median_ms")
    }
    helped, faster = len(stronger["gpu_ms"]), max(stronger["gpu_ms"]) - 1
    yield STAGE, f"stronger on {helped} of the 32 shapes by the GPU's time alone, by up to {faster:.0%}"
    yield STAGE, f"As the host issues them, on {len(stronger['median_ms'])}."
    fused = [float(shape["fused"]["gpu_ms"]) / float(shape["pgas"]["gpu_ms"]) for shape in shapes]
    mean = f"{statistics.geometric_mean(fused):.2f}"
    yield STAGE, f"of the 32 shapes, least, greatest | {mean}, {min(fused):.2f}, {max(fused):.2f} |"
    (few,) = (shape for shape in shapes if [shape["fused"][name] for name in _SHAPE] == ["32", "2048", "1"])
    yield STAGE, f"2048 samples: {1e3 * float(few['fused']['gpu_ms']):.1f} us instead of 26.3,"
    yield STAGE, f"{_over_strongest(few, 'gpu_ms'):.2f}x instead of 2.17x the strongest baseline."
    host_us = [statistics.median(1e3 * float(shape[name]["host_ms"]) for shape in shapes) for name in ("pgas", "fused")]
    yield STAGE, f"needs {host_us[0]:.0f} us for a step of `pgas` and {host_us[1]:.0f} us for one of `fused`"
    grid = runs_of("grid")
    told = [_times([_over_strongest(shape, time) for shape in grid]) for time in ("gpu_ms", "median_ms")]
    yield STAGE, f"All {len(grid)} shapes pay: {told[0]} by the GPU's time alone. As the host issues it, {told[1]};"
    yield STAGE, f"the geometric mean, {statistics.geometric_mean(gpu_speedups('grid')[1]):.2f}x, was 2.40x."
    behind = [float(shape["fused"]["gpu_ms"]) / float(shape["pgas"]["gpu_ms"]) - 1 for shape in grid]
    yield STAGE, f"on all 16 shapes by the GPU's time alone, by {_percent(behind)}."


@_phrases
def ablations() -> Iterable[tuple[str, str]]:
    slices = {row["slice_bags"]: ms_of(row) for row in read("slice_many_tables") if row["contender"] != "pgas"}
    yield STAGE, f"large ones {slices['128'] / slices['4'] - 1:.0%}, the opposite of the other shape"
    tasks = read("programs")
    first = {task["program"]: float(task["begin_us"]) for task in reversed(tasks)}
    begun, ended = math.ceil(max(first.values())), max(float(task["end_us"]) for task in tasks)
    yield STAGE, f"All have begun within {begun} us, and the last ends its last task after {ended:.0f}."


@_phrases
def gemm() -> Iterable[tuple[str, str]]:
    runs = gemm_runs("gemm")
    assert len(runs) == 14
    longest = max(ms_of(run["serial"]) - one_by_one(run["serial"]) for run in runs.values())
    yield GEMM, f"`serial` took up to {1e3 * longest:.0f} us longer than its collective and its product"
    over = [serially(run) / ms_of(run["auto"]) for run in runs.values()]
    assert min(over) > 1, "faster in all lines"
    yield GEMM, f"`auto` is faster in all fourteen lines too, by {_times(over)}"
    at_once = (_times(ms_of(run[name]) / ms_of(run["auto"]) for run in runs.values()) for name in ("serial", "torch"))
    yield GEMM, f"in all fourteen lines, by {' and by '.join(at_once)}."


@_phrases
def few_rows() -> Iterable[tuple[str, str]]:
    few = [run for (_, m, _, n), run in gemm_runs("gemm_few").items() if int(m) <= 512 and n == "8192"]
    yield GEMM, f"the best of them takes {_span(slowdown_of_few_rows(), '.2f')} times as long as `serial`"
    yield GEMM, f"and is as fast as it is, {_times(over(run, 'serial', 'auto') for run in few)}"


@_phrases
def two_gpus() -> Iterable[tuple[str, str]]:
    runs = gemm_runs("gemm_two")
    times = [_times(over(run, name, "auto") for run in runs.values()) for name in ("serial", "torch")]
    yield GEMM, f"in all eight lines, by {times[0]}, and than torch's operators by {times[1]}"
    scattered = [run for problem, run in runs.items() if problem[0] == "reduce_scatter"]
    behind = _span((100 * over(run, "triggered", "copies") - 100 for run in scattered), ".0f", "%")
    yield GEMM, f"in all four reduce-scatters, by {behind}"


@_phrases
def simulated() -> Iterable[tuple[str, str]]:
    made = runpy.run_path("docs/results/simulated_products_table.py")
    rows = read("simulated_products")
    few = [row for row in rows if made["group"](row) == made["group"](rows[0])]
    assert rows[0]["ranks"] == "8", "on 8 and 16 ranks, as the paper's"
    speedups = [speedup for speedup, _ in made["gains"](few, "arbitrated")]
    mean, most = made["geomean"](speedups) - 1, max(speedups) - 1
    without = made["geomean"]([speedup for speedup, _ in made["gains"](few, "near_memory")]) - 1
    yield FIGURES, f"{mean:.0%} in the mean, {most:.0%} at most; without arbitration {without:.0%}, in the paper 20% |"
    yield SIMULATOR, f"without arbitration the paper has 20%, where we have {without:.0%}"
    saved = []
    ids = read("simulated_p1_ids")
    for torchrec, fused in zip(ids[::2], ids[1::2], strict=True):
        assert (torchrec["backend"], fused["backend"], fused["world_size"]) == ("torchrec", "fused", "128")
        saved.append(100 - 100 * float(fused["ms"]) / float(torchrec["ms"]))
    yield FIGURES, f"too: {min(saved):.1f} to {max(saved):.0f}% |"
    yield SIMULATOR, f"lies between {min(saved):.1f}% and {max(saved):.0f}%, by what it does not tell"


@_phrases
def simulated_plan() -> Iterable[tuple[str, str]]:
    weak = read("simulated_weak")
    ms = {(row["plan"], row["world_size"], row["backend"], row["aggregate_bytes"]): float(row["ms"]) for row in weak}
    numbers = list(dict.fromkeys(row["world_size"] for row in weak))
    (row,) = (row for row in weak if (row["plan"], row["world_size"], row["backend"]) == ("auto", "64", "torchrec"))
    ours = {gpus: ms["auto", gpus, "fused", "65536"] for gpus in numbers}
    longer = {gpus: ours[gpus] / ms["even", gpus, "fused", "65536"] for gpus in numbers}
    reads = float(row["fullest_memory"])
    yield (
        SIMULATOR,
        f"{row['idle_ranks']} of them hold no table, and the fullest reads {reads:.2f} times the mean's rows",
    )
    yield SIMULATOR, f"takes {ours['64']:.4g} ms, {longer['64']:.1f} times as long as with tables divided evenly"
    yield SIMULATOR, f"on 1024 GPUs {longer['1024']:.0f} times as long"
    even = ms["even", "64", "torchrec", "0"]
    yield SIMULATOR, f"takes {even:.4g} ms on 64 GPUs, so our step by our plan is {even / ours['64']:.2f} times as fast"
    gains = {
        plan: [ms[plan, n, "torchrec", "0"] / ms[plan, n, "fused", "65536"] for n in numbers]
        for plan in ("auto", "even")
    }
    yield SIMULATOR, f"with an aggregator, is {_span(gains['auto'], '.2f')} times as fast as the baseline's"
    first, second, *_, sixteen, last = gains["even"]
    yield (
        SIMULATOR,
        f"it is {first:.2f} times as fast on one host, {second:.2f} to {sixteen:.2f} times on 2 to 16 hosts",
    )
    assert last < 1.005, "and no faster on 128"
    pays: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in read("simulated_pays"):
        pays.setdefault((row["hosts"], row["nic_gbit_per_s"]), {}).setdefault(row["backend"], []).append(
            float(row["ms"])
        )
    over = {key: [a / b for a, b in zip(of["torchrec"], of["fused"], strict=True)] for key, of in pays.items()}
    most = [max(over[key]) for key in (("1", "400.0"), ("16", "1600.0"), ("16", "400.0"))]
    yield SIMULATOR, f"{most[0]:.1f} times as fast within a host, {most[1]:.1f} and {most[2]:.1f} times between hosts"
    yield SIMULATOR, f"with one id a bag over 1600 Gb/s it costs {100 / over['16', '1600.0'][0] - 100:.0f}%"


@pytest.mark.parametrize("phrases", PHRASES, ids=lambda function: function.__name__)
def test_the_pages_say_what_the_rows_give(phrases: Phrases) -> None:
    for page, phrase in phrases():
        said = re.sub(r"\s+", " ", Path(page).read_text())
        assert phrase in said, f"{page} does not say: {phrase}"
