"""Each headline number of README and the pages is what its rows give: change a row, and a sentence is wrong.

`CLAIMS` gives all numbers of a paragraph, in order, from the CSV files in `docs/results`. A function of `PHRASES` gives
single phrases, in the pages' words. Tables of rows have tests of their own, in `test_docs.py`.
"""

import math
import re
import runpy
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from dlrm_overlap.bench.report.concurrent import summarise
from tests.published import Row, gpu_speedups, ms_of, read, runs_of

FIGURES = "docs/figures.md"
STAGE, GEMM = "docs/results/stage.md", "docs/results/gemm.md"
_CHAPTERS = ("captured_step", "copy_engines", "forward", "plan")
CAPTURED, COPIES, FORWARD, PLAN = (f"docs/architecture/{name}.md" for name in _CHAPTERS)
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
    once, twice = runs_of("strategies")
    for name, value in (("", "dma"), ("_stores", "stores"), ("_partition", "partition")):
        both = [f"{ms_of(run[f'pgas_graph{name}']):.3f}" for run in (once, twice) if f"pgas_graph{name}" in run]
        cell = f"{both[0]} ms" + "".join(f"; {each}" for each in both[1:])
        lines = [line for line in Path(CAPTURED).read_text().splitlines() if line.startswith(f"| `{value}` | ")]
        assert len(lines) == 1
        assert lines[0].replace("with 16384 samples a GPU ", "").endswith(f" | {cell} |"), (lines[0], cell)
    ablation = runs_of("ablation")[-1]
    ours, nccl, replicated = (ms_of(ablation[f"pgas_graph{name}"]) for name in ("", "_collective", "_data_parallel"))
    yield CAPTURED, f"{ours:.2f} ms, by NCCL {nccl:.2f}"
    yield PLAN, f"MLPerf's step takes {replicated:.2f} ms instead of {ours:.2f} on 4 x H200"
    puts = next(run for run in runs_of("stage_two_gpus") if run["pgas"]["dim"] == "128")
    in_place, stores, copies = (f"{ms_of(puts[name]):.2f}" for name in ("fused", "fused_stores", "fused_dma"))
    yield FORWARD, f"{stores} ms there instead of {in_place}"
    yield FORWARD, f"takes {copies} ms there, where nothing else wants the multiprocessors"
    rows = [row for row in read("collectives") if row["operation"] == "all_to_all" and row["beside"] == "nothing"]
    captured = {row["mb_per_peer"]: row for row in rows if row["contender"] == "dma" and row["captured"] == "True"}
    gb_per_s = [f"{float(captured[size]['gb_per_s']):.0f}" for size in ("64", "192", "512")]
    yield COPIES, f"has {gb_per_s[0]} and {gb_per_s[1]}, and {gb_per_s[2]} at 512 MB"


@_phrases
def stage() -> Iterable[tuple[str, str]]:
    saved = {
        name: [1 - ms_of(run[name]) / ms_of(run["baseline"]) for run in runs_of("stage")] for name in ("pgas", "nccl")
    }
    mean = f"{statistics.mean(saved['pgas']):.0%}"
    yield FIGURES, f"`pgas` {_percent(saved['pgas'])}, {mean} on average of five shapes"
    yield FIGURES, f"saves {_percent(saved['nccl'])} (`nccl`), and the shape that saves {max(saved['pgas']):.0%}"


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
    at_once, strongest = ([1 - 1 / each for each in column] for column in gpu_speedups("grid"))
    mean = f"{statistics.mean(at_once):.0%}"
    yield FIGURES, f"{_percent(at_once)}, {mean} on average, over one lookup, exchange and unpacking"
    yield FIGURES, f"{_percent(strongest)} over the strongest baseline"


def _swept(name: str, column: str) -> dict[str, float]:
    """Return the value of `column` -> ms of fused; no value stands for as many programs as fit."""
    return {row[column]: ms_of(row) for row in read(name) if row["contender"].startswith("fused")}


@_phrases
def ablations() -> Iterable[tuple[str, str]]:
    fused, own_shape = (_swept(name, "programs_per_sm") for name in ("occupancy", "occupancy_many_tables"))
    for of_shape in (fused, own_shape):
        assert min(of_shape, key=lambda programs: of_shape[programs]) == "", "as many as fit are the fastest"
    yield FIGURES, f"as fit, 32 a multiprocessor: {own_shape['']:.3f} ms, {own_shape['16']:.3f} with 16"
    yield FIGURES, f"on another, four GPUs, {fused['']:.2f} ms, {fused['16']:.2f} with 16"
    slices, own_shape = (_swept(name, "slice_bags") for name in ("slice", "slice_many_tables"))
    on_two = _swept("slice_two_gpus", "slice_bags")
    assert slices["32"] / min(slices.values()) < 1.01, "gains end at 32"
    assert on_two["8"] / min(on_two.values()) < 1.01, "gains end at 8"
    more, more_on_two = (f"{each['4'] / each['32'] - 1:.0%}" for each in (slices, on_two))
    yield FIGURES, f"slices of 4 take {more} longer than of 32, gains end at 32"
    yield FIGURES, f"later on two GPUs {more_on_two} and at 8"
    shorter, longer = (abs(own_shape[bags] / own_shape["32"] - 1) for bags in ("4", "128"))
    assert own_shape["4"] < own_shape["32"] < own_shape["128"]
    there = f"{shorter:.0%} shorter, and those of 128 {longer:.0%} longer"
    yield FIGURES, f"on the shape of its occupancy sweep, two GPUs, {there}"
    yield STAGE, f"large ones {own_shape['128'] / own_shape['4'] - 1:.0%}, the opposite of the other shape"
    skew = {(row["contender"], row["schedule"]): row["skew_fraction"] for row in read("schedule")}

    def percent(schedule: str, spec: str) -> str:
        return " and ".join(f"{100 * float(skew[name, schedule]):{spec}}%" for name in ("pgas", "fused"))

    others = f"{percent('remote_first', '.1f')} `remote_first`, {percent('balanced', '.1f')} `balanced`"
    yield FIGURES, f"{percent('linear', '.0f')} in linear order, {others}"
    tasks = read("programs")
    ended = max(float(task["end_us"]) for task in tasks)
    first = {task["program"]: float(task["begin_us"]) for task in reversed(tasks)}
    begun = math.ceil(max(first.values()))
    yield STAGE, f"All have begun within {begun} us, and the last ends its last task after {ended:.0f}."
    waits = [float(row["wait_us"]) for row in tasks]
    assert max(waits) < 0.1, "as stage.md says"
    yield FIGURES, f"none waits as long as {int(max(waits)) + 1} us"


@_phrases
def scaling() -> Iterable[tuple[str, str]]:
    for name in ("weak", "strong"):
        rows = {(row["world_size"], row["contender"]): row for row in read(name)}
        base = {gpus: rows[gpus, "baseline"] for gpus in "24"}
        over = [ms_of(base[gpus]) / ms_of(rows[gpus, "pgas"]) for gpus in "24"]
        yield FIGURES, f"`pgas` {over[0]:.2f}x, {over[1]:.2f}x ([{name}.csv]"
        two = {row["contender"]: row for row in read(f"{name}_two_gpus") if row["world_size"] == "2"}
        since = f"{ms_of(two['baseline']) / ms_of(two['pgas']):.2f}x on 2 ([{name}_two_gpus.csv]"
        yield FIGURES, f"([{name}.csv](results/{name}.csv)), since then {since}"
        hidden = {gpus: float(base[gpus]["all_to_all_ms"]) + float(base[gpus]["unpack_ms"]) for gpus in "24"}
        told = {gpus: f"{hidden[gpus]:.2f} of {ms_of(base[gpus]):.2f}" for gpus in "24"}
        if name == "weak":
            most = f"{ms_of(base['4']) / (ms_of(base['4']) - hidden['4']):.2f}x at most"
            yield FIGURES, f"are {told['4']} ms of the baseline on 4 GPUs, so hiding them brings {most}"
        else:
            yield FIGURES, f"they are {told['2']} ms on 2 GPUs and {told['4']} on 4"


@_phrases
def volume() -> Iterable[tuple[str, str]]:
    found = {}
    for name in ("fused", "baseline"):
        rows = [row for row in read("volume") if row["contender"] == name]
        busy = [row for row in rows if float(row["bytes"])]
        stage_us = float(rows[0]["stage_us"])
        us = min(
            stage_us, sum(float(row["end_us"]) - float(row["begin_us"]) for row in busy)
        )  # the last bin ends later
        link = float(rows[0]["link_gb_per_s"])
        most = max(float(row["gb_per_s"]) for row in rows) / link
        mean = sum(float(row["bytes"]) for row in busy) / us / 1e3 / link
        found[name] = f"{us / stage_us:.0%}", f"{mean:.0%}", f"{most:.0%}"
    during, mean, most = found["fused"]
    yield FIGURES, f"`fused` even for {during} of its time, at {mean} of the links' rate in the mean and {most} at most"
    yield FIGURES, f"the baseline in one burst of {found['baseline'][0]} of its time, at {found['baseline'][2]} at most"


@_phrases
def concurrent() -> Iterable[tuple[str, str]]:
    numbers = ("fraction_of_ideal", "speedup", "together_ms")
    rows = [{**row, **{name: float(row[name]) for name in numbers}} for row in read("concurrent")]
    whole = {line["strategy"]: f"{100 * line['all']:.0f}" for line in summarise(rows)}
    yield FIGURES, f"{whole['plain']}%, {whole['priority']}% ([concurrent.csv]"
    yield FIGURES, f"{whole['partition_20']} and {whole['partition_28']}% with 20 and 28 multiprocessors, less with 12"
    assert float(whole["partition_12"]) < float(whole["partition_20"])
    aside = f"{whole['dma_partition_4']} and {whole['dma_partition_12']}%"
    yield FIGURES, f"{whole['dma']} and {whole['dma_aside']}% (`dma`, `dma_aside`); {aside}"


def _serially(row: Row, serial: Row) -> float:
    """Return the ms of collective and product one after the other: those of `serial`, or of each timed alone if less.

    `serial` came first in every round of older rows, and a rank then waited for the others within it.
    """
    return min(ms_of(serial), float(row["gemm_ms"]) + float(row["collective_ms"]))


@_phrases
def gemm() -> Iterable[tuple[str, str]]:
    rows = read("gemm")
    serial = {_problem(row): row for row in rows if row["contender"] == "serial"}
    auto = {_problem(row): row for row in rows if row["contender"] == "auto"}
    assert len(auto) == 14
    longest = max(ms_of(each) - float(each["gemm_ms"]) - float(each["collective_ms"]) for each in serial.values())
    yield GEMM, f"`serial` took up to {1e3 * longest:.0f} us longer than its collective and its product"
    held = {problem: _serially(row, serial[problem]) for problem, row in auto.items()}
    over = [held[problem] / ms_of(row) for problem, row in auto.items()]
    assert min(over) > 1, "faster in all lines"
    yield GEMM, f"`auto` is faster in all fourteen lines too, by {_times(over)}"
    torch = {_problem(row): row for row in rows if row["contender"] == "torch"}
    serial_over, torch_over = (_times(ms_of(of[each]) / ms_of(auto[each]) for each in auto) for of in (serial, torch))
    yield GEMM, f"in all fourteen lines, by {serial_over} and by {torch_over}."
    gemm_ms = {problem: float(row["gemm_ms"]) for problem, row in auto.items()}
    efficiency = {
        problem: 1 - (ms_of(row) - gemm_ms[problem]) / (held[problem] - gemm_ms[problem])
        for problem, row in auto.items()
    }
    yield FIGURES, f"`auto` {_percent(efficiency.values())} over fourteen shapes on four GPUs"
    longer = [
        problem
        for problem, row in auto.items()
        if gemm_ms[problem] > float(row["link_bytes"]) / float(row["link_gb_per_s"]) / 1e6
    ]
    large, small = ([efficiency[each] for each in longer if (each[1] == "1024") == is_small] for is_small in (0, 1))
    told = f"{_percent(small).replace(' to ', ' and ')} at m = 1024"
    yield FIGURES, f"{_percent(large)} from m = 4096 on, {told}"


@_phrases
def few_rows() -> Iterable[tuple[str, str]]:
    ms: dict[tuple[str, ...], dict[str, float]] = {}
    for row in read("gemm_few"):
        ms.setdefault(_problem(row), {})[row["contender"]] = ms_of(row)
    few = [times for (_, m, _, n), times in ms.items() if int(m) <= 512 and n == "8192"]
    own = [min(times[name] for name in ("copies", "pushes", "tiles")) / times["serial"] for times in few]
    assert min(own) > 1, "slower than serial"
    yield GEMM, f"the best of them takes {_span(own, '.2f')} times as long as `serial`"
    yield FIGURES, f"the best of our own takes {_span(own, '.2f')} times as long ([gemm_few.csv]"
    yield GEMM, f"and is as fast as it is, {_times(times['serial'] / times['auto'] for times in few)}"


@_phrases
def two_gpus() -> Iterable[tuple[str, str]]:
    ms: dict[tuple[str, ...], dict[str, float]] = {}
    for row in read("gemm_two"):
        ms.setdefault(_problem(row), {})[row["contender"]] = ms_of(row)
    over = [_times(times[name] / times["auto"] for times in ms.values()) for name in ("serial", "torch")]
    yield GEMM, f"in all eight lines, by {over[0]}, and than torch's operators by {over[1]}"
    scattered = [times for problem, times in ms.items() if problem[0] == "reduce_scatter"]
    behind = [100 * (times["triggered"] / times["copies"] - 1) for times in scattered]
    yield GEMM, f"in all four reduce-scatters, by {min(behind):.0f} to {max(behind):.0f}%"


def _problem(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("operator", "m", "k", "n"))


@_phrases
def simulated() -> Iterable[tuple[str, str]]:
    made = runpy.run_path("docs/results/simulated_products_table.py")
    rows = read("simulated_products")
    few = [row for row in rows if made["group"](row) == made["group"](rows[0])]
    assert rows[0]["ranks"] == "8", "on 8 and 16 ranks, as the paper's"
    speedups = [speedup for speedup, _ in made["gains"](few, "arbitrated")]
    mean, most = made["geomean"](speedups) - 1, max(speedups) - 1
    yield FIGURES, f"{mean:.0%} in the mean, {most:.0%} at most |"
    steps = [row for row in read("simulated_p1") if row["world_size"] == "128" and row["schedule"] == "balanced"]
    ms = {(row["backend"], row["samples"]): float(row["ms"]) for row in steps if row["aggregate_bytes"] == "0"}
    saved = [f"{100 - 100 * ms['fused', count] / ms['torchrec', count]:.1f}" for count in ("256", "1024", "4096")]
    yield FIGURES, f"{saved[0]}, {saved[1]} and {saved[2]}% with 256, 1024 and 4096 samples a node"


def _puts() -> Iterable[float]:
    (run,) = runs_of("puts")
    chunked = ms_of(run["nccl_chunked_4"])
    return [4, chunked, chunked / ms_of(run["pgas"]), ms_of(run["baseline"]) / ms_of(run["pgas"])]


@pytest.mark.parametrize("phrases", PHRASES, ids=lambda function: function.__name__)
def test_the_pages_say_what_the_rows_give(phrases: Phrases) -> None:
    for page, phrase in phrases():
        said = re.sub(r"\s+", " ", Path(page).read_text())
        assert phrase in said, f"{page} does not say: {phrase}"
