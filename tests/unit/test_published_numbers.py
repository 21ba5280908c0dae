"""Each headline number of README and the pages is what its rows give: change a row, and a sentence is wrong.

A function of `PHRASES` computes what the pages must say, in their words, from the CSV files in `docs/results`. Tables
of rows have tests of their own, in `test_docs.py`.
"""

import math
import re
import runpy
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from dlrm_overlap.bench.report.concurrent import summarise
from dlrm_overlap.bench.report.map_plots import MAPS
from tests.conftest import read_rows

Row = Mapping[str, str]
REPORT = Path("docs/results/report/report.md")  # that it is the rows' own, test_docs.py tests
README, FIGURES, ARCHITECTURE = "README.md", "docs/figures.md", "docs/architecture.md"
SIMULATOR = "docs/simulator.md"
STAGE, GEMM = "docs/results/stage.md", "docs/results/gemm.md"
_CHAPTERS = ("captured_step", "copy_engines", "forward", "plan")
CAPTURED, COPIES, FORWARD, PLAN = (f"docs/architecture/{name}.md" for name in _CHAPTERS)
PHRASES: list[Callable[[], Iterable[tuple[str, str]]]] = []


def _phrases(function: Callable[[], Iterable[tuple[str, str]]]) -> Callable[[], Iterable[tuple[str, str]]]:
    PHRASES.append(function)
    return function


def _read(name: str) -> list[dict[str, str]]:
    return read_rows(Path(f"docs/results/{name}.csv"))


def _runs(name: str, first: str) -> list[dict[str, Row]]:
    """Return contender -> row of each run of a file, each of which begins with the row of `first`."""
    found: list[dict[str, Row]] = []
    for row in _read(name):
        if row["contender"] == first:
            found.append({})
        found[-1][row["contender"]] = row
    return found


def _ms(row: Row) -> float:
    return float(row["median_ms"])


def _span(values: Iterable[float], spec: str, unit: str = "") -> str:
    values = list(values)
    return f"{min(values):{spec}} to {max(values):{spec}}{unit}"


def _times(values: Iterable[float]) -> str:
    return _span(values, ".2f", "x").replace(" to", "x to")


def _percent(values: Iterable[float]) -> str:
    return _span([100 * each for each in values], ".0f", "%")


@_phrases
def step() -> Iterable[tuple[str, str]]:
    runs = [run for run in _runs("step", "torchrec") if run["torchrec"]["pinned_host"] == "False"]
    mlperf, twice, dot, _ = runs

    def over(run: dict[str, Row], name: str) -> str:
        return f"{_ms(run[name]) / _ms(run['pgas_graph']):.2g}"

    yield README, f"{over(mlperf, 'torchrec_strongest')} times as fast as TorchRec's at its strongest"
    yield README, f"{over(mlperf, 'torchrec')} times as fast as TorchRec's as people run it"
    yield README, f"{over(twice, 'torchrec_strongest')} and {over(twice, 'torchrec')} times with 16384 samples"
    yield README, f"up to {over(dot, 'torchrec_strongest')} times with 2048 samples and dot products"
    hosts = [_ms(run[name]) for run in (mlperf, twice, dot) for name in ("torchrec", "torchrec_strongest")]
    yield README, f"as its host needs to issue it, {min(hosts):.1f} to {max(hosts):.0f} ms here"
    (eager,) = (row for row in _read("ablation") if row["contender"] == "pgas_eager")
    assert eager["reference"] == "torchrec"
    alone = f"{float(eager['reference_ms']) / _ms(eager):.2f} times"
    yield README, f"{alone} if you take the embedding exchange alone and stay in TorchRec's train pipeline"
    strategies = _runs("strategies", "torchrec")[0]
    slowest = [f"{_ms(strategies[name]):.1f}" for name in ("torchrec", "torchrec_strongest")]
    yield README, f"its first row was 9.3 to {slowest[0]} and 6.7 to {slowest[1]} ms."
    (headline,) = re.findall(r"[\d.]+ to [\d.]+ times as fast as under TorchRec at its strongest", REPORT.read_text())
    yield FIGURES, f"that was {headline.replace(' under', '')};"
    wide = _runs("wide", "pgas_graph")[0]
    yield README, f"takes {_ms(wide['pgas_graph_tensor']):.2f} ms instead of {_ms(wide['pgas_graph']):.2f}"
    strongest, captured = (f"{_ms(mlperf[name]):.2f} ms" for name in ("torchrec_strongest", "pgas_graph"))
    yield ARCHITECTURE, f"takes {strongest} under TorchRec at its strongest, and {captured} captured"


@_phrases
def chapters() -> Iterable[tuple[str, str]]:
    once, twice = _runs("strategies", "torchrec")
    for name, value in (("", "dma"), ("_stores", "stores"), ("_partition", "partition")):
        both = [f"{_ms(run[f'pgas_graph{name}']):.3f}" for run in (once, twice) if f"pgas_graph{name}" in run]
        cell = f"{both[0]} ms" + "".join(f"; {each}" for each in both[1:])
        lines = [line for line in Path(CAPTURED).read_text().splitlines() if line.startswith(f"| `{value}` | ")]
        assert len(lines) == 1
        assert lines[0].replace("with 16384 samples a GPU ", "").endswith(f" | {cell} |"), (lines[0], cell)
    ablation = _runs("ablation", "torchrec")[-1]
    ours, nccl, replicated = (_ms(ablation[f"pgas_graph{name}"]) for name in ("", "_collective", "_data_parallel"))
    yield CAPTURED, f"{ours:.2f} ms, by NCCL {nccl:.2f}"
    yield PLAN, f"MLPerf's step takes {replicated:.2f} ms instead of {ours:.2f} on 4 x H200"
    puts = next(run for run in _runs("stage_two_gpus", "baseline") if run["pgas"]["dim"] == "128")
    in_place, stores, copies = (f"{_ms(puts[name]):.2f}" for name in ("fused", "fused_stores", "fused_dma"))
    yield FORWARD, f"{stores} ms there instead of {in_place}"
    yield FORWARD, f"takes {copies} ms there, where nothing else wants the multiprocessors"
    rows = [row for row in _read("collectives") if row["operation"] == "all_to_all" and row["beside"] == "nothing"]
    captured = {row["mb_per_peer"]: row for row in rows if row["contender"] == "dma" and row["captured"] == "True"}
    gb_per_s = [f"{float(captured[size]['gb_per_s']):.0f}" for size in ("64", "192", "512")]
    yield COPIES, f"has {gb_per_s[0]} and {gb_per_s[1]}, and {gb_per_s[2]} at 512 MB"


@_phrases
def stage() -> Iterable[tuple[str, str]]:
    runs = _runs("stage", "baseline")
    saved = {name: [1 - _ms(run[name]) / _ms(run["baseline"]) for run in runs] for name in ("pgas", "nccl")}
    mean = f"{statistics.mean(saved['pgas']):.0%}"
    yield FIGURES, f"`pgas` {_percent(saved['pgas'])}, {mean} on average of five shapes"
    yield FIGURES, f"saves {_percent(saved['nccl'])} (`nccl`), and the shape that saves {max(saved['pgas']):.0%}"
    (puts,) = _runs("puts", "baseline")
    over = {name: _ms(puts[name]) / _ms(puts["pgas"]) for name in ("nccl_chunked_4", "baseline")}
    chunked = f"{over['nccl_chunked_4']:.2f} times as fast instead of {over['baseline']:.2f}"
    yield README, f"it takes {_ms(puts['nccl_chunked_4']):.2f} ms on the third shape, and `pgas` is {chunked}"


@_phrases
def stage_on_two() -> Iterable[tuple[str, str]]:
    over: dict[str, list[float]] = {}
    ms: dict[str, list[dict[str, float]]] = {}
    for name in ("stage_two_gpus", "stage_two_gpus_bf16"):
        ms[name] = [{each: _ms(row) for each, row in run.items()} for run in _runs(name, "baseline")]
        ours = [min(run["pgas"], run["fused"]) for run in ms[name]]
        baselines = [[run[each] for each in run if each.startswith(_BASELINES)] for run in ms[name]]
        over[name] = [min(times) / least for times, least in zip(baselines, ours, strict=True)]
    (*most, last), (*most_bf16, last_bf16) = over.values()
    yield STAGE, f"is {_span(most, '.2f', 'x').replace(' to', 'x to')} as fast on the first four shapes"
    yield STAGE, f"On the last it is {last:.1f}x as the host issues it"
    yield (
        STAGE,
        f"**In bf16** it is {_span(most_bf16, '.2f', 'x').replace(' to', 'x to')}, and {last_bf16:.2f}x on the last",
    )
    fp32, bf16 = ms.values()
    saved = [1 - narrow["pgas"] / wide["pgas"] for wide, narrow in zip(fp32, bf16, strict=True)]
    yield (
        STAGE,
        f"save `pgas` {saved[3]:.0%} with one id a bag, where the links are the limit, {saved[2]:.0%} on the third",
    )
    assert all(abs(each) < 0.015 for each in saved[:2]), "nothing where reading rows is all"
    baseline = [1 - narrow["baseline"] / wide["baseline"] for wide, narrow in zip(fp32[:4], bf16, strict=False)]
    yield STAGE, f"They save the baseline {_span([100 * each for each in baseline], '.0f', '%')} on the first four"
    assert 0.99 <= bf16[3]["fused"] / bf16[3]["pgas"] <= 1.01, "as long as pgas"
    chunks = [min(ms for name, ms in run.items() if "chunked" in name) for run in bf16]
    pays = [run["baseline"] / least - 1 for run, least in zip(bf16, chunks, strict=True)]
    assert [gain > 0 for gain in pays] == [True, False, True, False, False]
    yield STAGE, f"on the first and the third shape, by {pays[0]:.0%} and {pays[2]:.0%}."
    for run, gain in zip(_runs("stage_two_gpus_bf16", "baseline"), pays, strict=True):
        assert (float(run["nccl_chunked_2"]["host_ms"]) > _ms(run["baseline"])) == (gain < 0)
    in_place = [run["fused"] / run["pgas"] for run in fp32]
    assert all(1.0 <= round(each, 2) <= 1.03 for each in in_place[:4])
    yield STAGE, f"which is the host's, it takes {in_place[4]:.2f}"
    assert all(min(run["fused_stores"], run["fused_dma"]) >= run["fused"] for run in fp32)


_BASELINES = ("baseline", "torchrec", "nccl_chunked")


def _gpu_speedups(name: str) -> tuple[list[float], list[float]]:
    """Return the fastest of ours over the baseline at once, and over the strongest, by the GPU's time, by shape."""
    rows = _read(name)
    strongest = MAPS[name].cells(rows, "gpu_ms")
    at_once = MAPS[name].cells([row for row in rows if "chunked" not in row["contender"]], "gpu_ms")
    return [cell.speedup for cell in at_once.values()], [cell.speedup for cell in strongest.values()]


_SHAPE = ("dim", "global_batch", "pooling_factor")


def _by_shape(name: str) -> list[dict[str, Row]]:
    """Return contender -> its row of each shape of a map."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in _read(name):
        shape = tuple(row[column] for column in (*_SHAPE, "tables"))
        found.setdefault(shape, {})[row["contender"]] = row
    return [*found.values()]


def _strongest(shape: Mapping[str, Row], time: str) -> float:
    return min(float(row[time]) for row in shape.values() if row["is_baseline"] == "True")


def _over_strongest(shape: Mapping[str, Row], time: str) -> float:
    return _strongest(shape, time) / min(float(shape[name][time]) for name in ("pgas", "fused"))


@_phrases
def maps() -> Iterable[tuple[str, str]]:
    _, over = _gpu_speedups("sweep")
    mean = f"{statistics.geometric_mean(over):.2f}"
    yield README, f"{mean} times as fast as its strongest baseline, in the geometric mean of {len(over)} shapes"
    assert min(over) >= 1.05, "it pays on all shapes"
    yield README, f"It pays on all {len(over)} shapes"
    yield (
        STAGE,
        f"{min(over):.2f}x to {max(over):.2f}x as fast as the strongest baseline, {mean}x in the geometric mean",
    )
    shapes = _by_shape("sweep")
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
    grid = _by_shape("grid")
    told = [_times([_over_strongest(shape, time) for shape in grid]) for time in ("gpu_ms", "median_ms")]
    yield STAGE, f"All {len(grid)} shapes pay: {told[0]} by the GPU's time alone. As the host issues it, {told[1]};"
    yield STAGE, f"the geometric mean, {statistics.geometric_mean(_gpu_speedups('grid')[1]):.2f}x, was 2.40x."
    behind = [float(shape["fused"]["gpu_ms"]) / float(shape["pgas"]["gpu_ms"]) - 1 for shape in grid]
    yield STAGE, f"on all 16 shapes by the GPU's time alone, by {_percent(behind)}."
    at_once, strongest = ([1 - 1 / each for each in column] for column in _gpu_speedups("grid"))
    mean = f"{statistics.mean(at_once):.0%}"
    yield FIGURES, f"{_percent(at_once)}, {mean} on average, over one lookup, exchange and unpacking"
    yield FIGURES, f"{_percent(strongest)} over the strongest baseline"


def _swept(name: str, column: str) -> dict[str, float]:
    """Return the value of `column` -> ms of fused; no value stands for as many programs as fit."""
    return {row[column]: _ms(row) for row in _read(name) if row["contender"].startswith("fused")}


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
    skew = {(row["contender"], row["schedule"]): row["skew_fraction"] for row in _read("schedule")}

    def percent(schedule: str, spec: str) -> str:
        return " and ".join(f"{100 * float(skew[name, schedule]):{spec}}%" for name in ("pgas", "fused"))

    others = f"{percent('remote_first', '.1f')} `remote_first`, {percent('balanced', '.1f')} `balanced`"
    yield FIGURES, f"{percent('linear', '.0f')} in linear order, {others}"
    tasks = _read("programs")
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
        rows = {(row["world_size"], row["contender"]): row for row in _read(name)}
        base = {gpus: rows[gpus, "baseline"] for gpus in "24"}
        over = [_ms(base[gpus]) / _ms(rows[gpus, "pgas"]) for gpus in "24"]
        yield FIGURES, f"`pgas` {over[0]:.2f}x, {over[1]:.2f}x ([{name}.csv]"
        two = {row["contender"]: row for row in _read(f"{name}_two_gpus") if row["world_size"] == "2"}
        since = f"{_ms(two['baseline']) / _ms(two['pgas']):.2f}x on 2 ([{name}_two_gpus.csv]"
        yield FIGURES, f"([{name}.csv](results/{name}.csv)), since then {since}"
        hidden = {gpus: float(base[gpus]["all_to_all_ms"]) + float(base[gpus]["unpack_ms"]) for gpus in "24"}
        told = {gpus: f"{hidden[gpus]:.2f} of {_ms(base[gpus]):.2f}" for gpus in "24"}
        if name == "weak":
            most = f"{_ms(base['4']) / (_ms(base['4']) - hidden['4']):.2f}x at most"
            yield FIGURES, f"are {told['4']} ms of the baseline on 4 GPUs, so hiding them brings {most}"
        else:
            yield FIGURES, f"they are {told['2']} ms on 2 GPUs and {told['4']} on 4"


@_phrases
def volume() -> Iterable[tuple[str, str]]:
    found = {}
    for name in ("fused", "baseline"):
        rows = [row for row in _read("volume") if row["contender"] == name]
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
    rows = [{**row, **{name: float(row[name]) for name in numbers}} for row in _read("concurrent")]
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
    return min(_ms(serial), float(row["gemm_ms"]) + float(row["collective_ms"]))


@_phrases
def gemm() -> Iterable[tuple[str, str]]:
    rows = _read("gemm")
    serial = {_problem(row): row for row in rows if row["contender"] == "serial"}
    auto = {_problem(row): row for row in rows if row["contender"] == "auto"}
    assert len(auto) == 14
    longest = max(_ms(each) - float(each["gemm_ms"]) - float(each["collective_ms"]) for each in serial.values())
    yield GEMM, f"`serial` took up to {1e3 * longest:.0f} us longer than its collective and its product"
    held = {problem: _serially(row, serial[problem]) for problem, row in auto.items()}
    over = [held[problem] / _ms(row) for problem, row in auto.items()]
    assert min(over) > 1, "faster in all lines"
    yield GEMM, f"`auto` is faster in all fourteen lines too, by {_times(over)}"
    gemm_ms = {problem: float(row["gemm_ms"]) for problem, row in auto.items()}
    efficiency = {
        problem: 1 - (_ms(row) - gemm_ms[problem]) / (held[problem] - gemm_ms[problem]) for problem, row in auto.items()
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
    for row in _read("gemm_few"):
        ms.setdefault(_problem(row), {})[row["contender"]] = _ms(row)
    few = [times for (_, m, _, n), times in ms.items() if int(m) <= 512 and n == "8192"]
    own = [min(times[name] for name in ("copies", "pushes", "tiles")) / times["serial"] for times in few]
    assert min(own) > 1, "slower than serial"
    yield GEMM, f"the best of them takes {_span(own, '.2f')} times as long as `serial`"
    yield FIGURES, f"the best of our own takes {_span(own, '.2f')} times as long ([gemm_few.csv]"
    yield GEMM, f"and is as fast as it is, {_times(times['serial'] / times['auto'] for times in few)}"


@_phrases
def two_gpus() -> Iterable[tuple[str, str]]:
    ms: dict[tuple[str, ...], dict[str, float]] = {}
    for row in _read("gemm_two"):
        ms.setdefault(_problem(row), {})[row["contender"]] = _ms(row)
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
    rows = _read("simulated_products")
    few = [row for row in rows if made["group"](row) == made["group"](rows[0])]
    assert rows[0]["ranks"] == "8", "on 8 and 16 ranks, as the paper's"
    speedups = [speedup for speedup, _ in made["gains"](few, "arbitrated")]
    mean, most = made["geomean"](speedups) - 1, max(speedups) - 1
    without = made["geomean"]([speedup for speedup, _ in made["gains"](few, "near_memory")]) - 1
    yield FIGURES, f"{mean:.0%} in the mean, {most:.0%} at most; without arbitration {without:.0%}, in the paper 20% |"
    yield SIMULATOR, f"without arbitration the paper has 20%, where we have {without:.0%}"
    saved = []
    ids = _read("simulated_p1_ids")
    for torchrec, fused in zip(ids[::2], ids[1::2], strict=True):
        assert (torchrec["backend"], fused["backend"], fused["world_size"]) == ("torchrec", "fused", "128")
        saved.append(100 - 100 * float(fused["ms"]) / float(torchrec["ms"]))
    yield FIGURES, f"too: {min(saved):.1f} to {max(saved):.0f}% |"
    yield SIMULATOR, f"lies between {min(saved):.1f}% and {max(saved):.0f}%, by what it does not tell"


@_phrases
def simulated_plan() -> Iterable[tuple[str, str]]:
    weak = _read("simulated_weak")
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
    for row in _read("simulated_pays"):
        pays.setdefault((row["hosts"], row["nic_gbit_per_s"]), {}).setdefault(row["backend"], []).append(
            float(row["ms"])
        )
    over = {key: [a / b for a, b in zip(of["torchrec"], of["fused"], strict=True)] for key, of in pays.items()}
    most = [max(over[key]) for key in (("1", "400.0"), ("16", "1600.0"), ("16", "400.0"))]
    yield SIMULATOR, f"{most[0]:.1f} times as fast within a host, {most[1]:.1f} and {most[2]:.1f} times between hosts"
    yield SIMULATOR, f"with one id a bag over 1600 Gb/s it costs {100 / over['16', '1600.0'][0] - 100:.0f}%"


@_phrases
def backward() -> Iterable[tuple[str, str]]:
    over = [float(row["speedup"]) for row in _read("backward") if row["contender"] == "push"]
    yield README, f"is {_span(over, '.1f')} times as fast as NCCL and FBGEMM's update"


@_phrases
def collectives() -> Iterable[tuple[str, str]]:
    rows = [row for row in _read("collectives") if row["operation"] == "all_to_all" and row["mb_per_peer"] == "192"]
    alone = [row for row in rows if row["beside"] == "nothing"]
    ours, nccl = ([float(row["gb_per_s"]) for row in alone if row["contender"] in names] for names in (("dma",), _NCCL))
    yield README, f"leaves a GPU at {max(ours):.0f} GB/s by copy engines, at {_span(nccl, '.0f')} by NCCL"
    beside = [row for row in rows if row["beside"] != "nothing"]
    both = {
        is_ours: min(_ms(row) for row in beside if (row["contender"] == "dma") == is_ours) for is_ours in (True, False)
    }
    best = min(_ms(row) for row in beside if row["contender"] in _NCCL)
    product = f"a matrix product of {float(beside[0]['product_ms']):.2f} ms"
    yield README, f"{product} both are done after {both[True]:.2f} ms, with NCCL after {best:.2f} at best"


_NCCL = ("nccl", "nccl_registered", "nccl_copy_engines")


@pytest.mark.parametrize("phrases", PHRASES, ids=lambda function: function.__name__)
def test_the_pages_say_what_the_rows_give(phrases: Callable[[], Iterable[tuple[str, str]]]) -> None:
    for page, phrase in phrases():
        said = re.sub(r"\s+", " ", Path(page).read_text())
        assert phrase in said, f"{page} does not say: {phrase}"
