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
from dlrm_overlap.bench.report.map_plots import MAPS
from dlrm_overlap.bench.report.measured import runs
from tests.conftest import read_rows, read_table

Row = Mapping[str, str]
README, FIGURES, ARCHITECTURE = "README.md", "docs/figures.md", "docs/architecture.md"
STAGE, STEP, BACKWARD, GEMM = (f"docs/results/{name}.md" for name in ("stage", "step", "backward", "gemm"))
_CHAPTERS = ("captured_step", "copy_engines", "forward", "plan")
CAPTURED, COPIES, FORWARD, PLAN = (f"docs/architecture/{name}.md" for name in _CHAPTERS)
Phrases = Callable[[], Iterable[tuple[str, str]]]
PHRASES: list[Phrases] = []


def _phrases(function: Phrases) -> Phrases:
    PHRASES.append(function)
    return function


def _read(name: str) -> list[dict[str, str]]:
    return read_rows(Path(f"docs/results/{name}.csv"))


def _runs(name: str) -> list[Mapping[str, Row]]:
    """Return contender -> row of each run of a file."""
    return [*runs(_read(name))]


def _ms(row: Row) -> float:
    return float(row["median_ms"])


def _ends(values: Iterable[float]) -> list[float]:
    values = list(values)
    return [min(values), max(values)]


def _span(values: Iterable[float], spec: str, unit: str = "") -> str:
    values = list(values)
    return f"{min(values):{spec}} to {max(values):{spec}}{unit}"


def _times(values: Iterable[float]) -> str:
    return _span(values, ".2f", "x").replace(" to", "x to")


def _percent(values: Iterable[float]) -> str:
    return _span([100 * each for each in values], ".0f", "%")


def _column(rows: Iterable[Row], column: str, scale: float = 1) -> list[float]:
    return [scale * float(row[column]) for row in rows]


@_phrases
def chapters() -> Iterable[tuple[str, str]]:
    once, twice = _runs("strategies")
    for name, value in (("", "dma"), ("_stores", "stores"), ("_partition", "partition")):
        both = [f"{_ms(run[f'pgas_graph{name}']):.3f}" for run in (once, twice) if f"pgas_graph{name}" in run]
        cell = f"{both[0]} ms" + "".join(f"; {each}" for each in both[1:])
        lines = [line for line in Path(CAPTURED).read_text().splitlines() if line.startswith(f"| `{value}` | ")]
        assert len(lines) == 1
        assert lines[0].replace("with 16384 samples a GPU ", "").endswith(f" | {cell} |"), (lines[0], cell)
    ablation = _runs("ablation")[-1]
    ours, nccl, replicated = (_ms(ablation[f"pgas_graph{name}"]) for name in ("", "_collective", "_data_parallel"))
    yield CAPTURED, f"{ours:.2f} ms, by NCCL {nccl:.2f}"
    yield PLAN, f"MLPerf's step takes {replicated:.2f} ms instead of {ours:.2f} on 4 x H200"
    puts = next(run for run in _runs("stage_two_gpus") if run["pgas"]["dim"] == "128")
    in_place, stores, copies = (f"{_ms(puts[name]):.2f}" for name in ("fused", "fused_stores", "fused_dma"))
    yield FORWARD, f"{stores} ms there instead of {in_place}"
    yield FORWARD, f"takes {copies} ms there, where nothing else wants the multiprocessors"
    rows = [row for row in _read("collectives") if row["operation"] == "all_to_all" and row["beside"] == "nothing"]
    captured = {row["mb_per_peer"]: row for row in rows if row["contender"] == "dma" and row["captured"] == "True"}
    gb_per_s = [f"{float(captured[size]['gb_per_s']):.0f}" for size in ("64", "192", "512")]
    yield COPIES, f"has {gb_per_s[0]} and {gb_per_s[1]}, and {gb_per_s[2]} at 512 MB"


@_phrases
def stage() -> Iterable[tuple[str, str]]:
    saved = {name: [1 - _ms(run[name]) / _ms(run["baseline"]) for run in _runs("stage")] for name in ("pgas", "nccl")}
    mean = f"{statistics.mean(saved['pgas']):.0%}"
    yield FIGURES, f"`pgas` {_percent(saved['pgas'])}, {mean} on average of five shapes"
    yield FIGURES, f"saves {_percent(saved['nccl'])} (`nccl`), and the shape that saves {max(saved['pgas']):.0%}"


@_phrases
def stage_on_two() -> Iterable[tuple[str, str]]:
    over: dict[str, list[float]] = {}
    ms: dict[str, list[dict[str, float]]] = {}
    for name in ("stage_two_gpus", "stage_two_gpus_bf16"):
        ms[name] = [{each: _ms(row) for each, row in run.items()} for run in _runs(name)]
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
    for run, gain in zip(_runs("stage_two_gpus_bf16"), pays, strict=True):
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


def _strongest(shape: Mapping[str, Row], time: str) -> float:
    return min(float(row[time]) for row in shape.values() if row["is_baseline"] == "True")


def _over_strongest(shape: Mapping[str, Row], time: str) -> float:
    return _strongest(shape, time) / min(float(shape[name][time]) for name in ("pgas", "fused"))


@_phrases
def maps() -> Iterable[tuple[str, str]]:
    _, over = _gpu_speedups("sweep")
    mean = f"{statistics.geometric_mean(over):.2f}"
    assert min(over) >= 1.05, "it pays on all shapes"
    yield (
        STAGE,
        f"{min(over):.2f}x to {max(over):.2f}x as fast as the strongest baseline, {mean}x in the geometric mean",
    )
    shapes = _runs("sweep")
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
    grid = _runs("grid")
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
    torch = {_problem(row): row for row in rows if row["contender"] == "torch"}
    serial_over, torch_over = (_times(_ms(of[each]) / _ms(auto[each]) for each in auto) for of in (serial, torch))
    yield GEMM, f"in all fourteen lines, by {serial_over} and by {torch_over}."
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
    yield FIGURES, f"{mean:.0%} in the mean, {most:.0%} at most |"
    steps = [row for row in _read("simulated_p1") if row["world_size"] == "128" and row["schedule"] == "balanced"]
    ms = {(row["backend"], row["samples"]): float(row["ms"]) for row in steps if row["aggregate_bytes"] == "0"}
    saved = [f"{100 - 100 * ms['fused', count] / ms['torchrec', count]:.1f}" for count in ("256", "1024", "4096")]
    yield FIGURES, f"{saved[0]}, {saved[1]} and {saved[2]}% with 256, 1024 and 4096 samples a node"


def _puts() -> Iterable[float]:
    (run,) = _runs("puts")
    chunked = _ms(run["nccl_chunked_4"])
    return [4, chunked, chunked / _ms(run["pgas"]), _ms(run["baseline"]) / _ms(run["pgas"])]


Claims = Callable[[], Iterable[tuple[str, Iterable[float | str]]]]
THEIRS = ("torchrec", "torchrec_strongest")


def _step_runs(samples: int, arch: str = "dcn") -> list[Mapping[str, Row]]:
    """Return all runs of a step on four GPUs whose hosts are not short of time."""
    shape = {"world_size": "4", "arch": arch, "global_batch": str(4 * samples)}
    found = [run for name in ("step", "ablation", "strategies") for run in _runs(name)]
    found = [run for run in found if shape.items() <= run["torchrec"].items()]
    return [run for run in found if run["torchrec"].get("pinned_host") != "True"]


def _all_ms(name: str, runs: Iterable[Mapping[str, Row]]) -> list[float]:
    return sorted(_ms(run[name]) for run in runs if name in run)


def _by_the_clock(runs: Iterable[Mapping[str, Row]]) -> list[float]:
    """Return how many times as fast `pgas_graph` is as TorchRec at its strongest in the same turns, the least first."""
    return sorted(_ms(run[THEIRS[1]]) / _ms(run["pgas_graph"]) for run in runs if THEIRS[1] in run)


def _busy(name: str, arch: str) -> list[float]:
    """Return the least ms that a rank's GPU is not idle in, of TorchRec at its strongest, of ours, and their ratio."""
    rows = [row for row in _read(name) if row["arch"] == arch]
    least = [
        min(float(row["step_ms"]) - float(row["idle_ms"]) for row in rows if row["contender"] == contender)
        for contender in (THEIRS[1], "pgas_graph")
    ]
    return [*least, least[0] / least[1]]


def _puts() -> list[float]:
    """Return the ms in chunks, and that over `pgas`, over its copied output, and the baseline over `pgas`."""
    (run,) = _runs("puts")
    chunked, baseline, lent, copied = (_ms(run[name]) for name in ("nccl_chunked_4", "baseline", "pgas", "pgas_copied"))
    return [chunked, chunked / lent, chunked / copied, baseline / lent]


def _fastest_copies() -> float:
    return max(_column((row for row in _read("collectives") if row["contender"] == "dma"), "gb_per_s"))


def readme_claims() -> Iterable[tuple[str, Iterable[float | str]]]:
    runs, twice, dot = _step_runs(8192), _step_runs(16384), _step_runs(2048, "dot")
    clock, gpu = _ends(_by_the_clock(runs)), _busy("timeline", "dcn")[-1]
    yield "**How much faster is my job?**", [4, 8192, gpu, *clock]
    (eager,) = (row for row in _read("ablation") if row["contender"] == "pgas_eager")
    assert (eager["reference"], eager["wire_dtype"]) == ("torchrec", "bf16"), "on our side only"
    yield "- **The exchange alone**", [float(eager["reference_ms"]) / _ms(eager)]
    over = _gpu_speedups("sweep")[1]
    yield "- **The embedding stage**", [statistics.geometric_mean(over), len(over)]
    own = _all_ms("torchrec_no_balance", runs)
    yield "**The training step** on", [4, *own]
    names = (*THEIRS, "pgas_graph")
    as_run, strongest, ours = (_ends(_all_ms(name, runs) + own * (name == "torchrec")) for name in names)
    yield "| MLPerf's DLRM", [4, 8192, *as_run, *strongest, *ours, *clock, gpu]
    yield "| the same, 16384", [16384, *(ms for name in names for ms in _all_ms(name, twice)), *_by_the_clock(twice)]
    dots = [_busy("calibration/timeline", "dot")[-1]]
    yield "| the same tables, dot", [2048, *(_ms(dot[0][name]) for name in names), *_by_the_clock(dot), *dots]
    (record, *_) = read_table(STEP, "| | global batch |")
    yield "HugeCTR's record", [4, float(record[2]), 32768, 4, 40]
    yield "**The embedding stage** on", [4, 100]
    yield "That baseline looks up", [*_puts()[:3], 2, len(over)]
    rows = _read("backward")
    sorting, hidden = ([row for row in rows if row["contender"] == name] for name in ("push_exposed", "push"))
    yield "The backward, from", [*_ends(_column(sorting, "speedup")), *_ends(_column(hidden, "speedup"))]
    yield "[^limit]:", [100 * _fastest_copies() / float(_read("stage")[0]["link_gb_per_s"]) - 100]
    host_us = _column((row for row in _read("sweep") if row["contender"] == "fused"), "host_ms", 1e3)
    yield "Which one?", [round(statistics.median(host_us), -1)]
    data, tensor = map(_ms, _read("wide"))
    yield "Under each of them", [8192, 512, tensor, data, 4]
    stacks = re.findall(r'"(?:torch|fbgemm-gpu|fbgemm-gpu-cpu)==(\d+\.\d+)', Path("pyproject.toml").read_text())
    torchrec, triton = (_read("stage")[0][name] for name in ("torchrec", "triton"))
    pythons = re.findall(r"Python :: (3\.\d+)", Path("pyproject.toml").read_text()) or ["3.11", "3.12"]
    yield "- torch 2.11", [*stacks[2:], torchrec, triton[:3], *stacks[:2], stacks[1], *pythons]


def step_claims() -> Iterable[tuple[str, Iterable[float | str]]]:
    first, pinned, twice, dot, one = _runs("step")
    runs, unpinned, ours = _step_runs(8192), (first, twice, dot, one), first["pgas_graph"]
    a_second = float(ours["samples_per_s"]) / 1e6
    yield "ms. Rows of tables", [4, a_second, a_second / 4]
    yield "| `pgas_graph`, 4 x H200, the first", [4, 32768, _ms(ours), a_second / 4]
    yield "**Missed:** 1.7x", [1.7, 1.7 - _by_the_clock([twice])[0]]
    clocks = [*_by_the_clock(runs), *_by_the_clock(_step_runs(16384))]
    yield "**How far the ratios", [*_ends(_all_ms("torchrec", runs)), *_all_ms(THEIRS[1], runs), *clocks]
    mlperf, dots = _busy("timeline", "dcn"), _busy("calibration/timeline", "dot")
    yield "**By the GPUs' own", [mlperf[2], dots[2], mlperf[0], dots[0], mlperf[1], dots[1]]
    (planned,) = (run for run in runs if "torchrec_no_balance" in run)
    bf16 = [run["torchrec_bf16_output"] for run in (first, twice)]
    apart = max(_column(bf16, "max_relative_difference"))
    yield (
        "**The plan** is",
        [*(_ms(planned[name]) for name in ("torchrec_no_balance", "torchrec")), *map(_ms, bf16), apart],
    )
    p95 = {
        name: _ends(_column((run[name] for run in unpinned), "p95_to_median")) for name in ("pgas_graph", "torchrec")
    }
    yield "**Steps are alike.**", [95, *p95["pgas_graph"], p95["torchrec"][1]]
    yield (
        "**A host short of time",
        map(_ms, (pinned["pgas_graph"], *(run[name] for name in THEIRS for run in (pinned, first)))),
    )
    floors = [float(ours[name]) for name in ("floor_ms", "floor_sum_ms")]
    yield "**The floor**", [floors[0], 790, floors[1], *(100 * each / _ms(ours) for each in floors)]

    def percents(contender: str, kind: str = "exposed") -> list[float]:
        return _column((row for row in _read("timeline") if row["contender"] == contender), f"{kind}_fraction", 100)

    exposed, most, idle = (percents("pgas_graph", kind) for kind in ("exposed", "exposed_most", "idle"))
    others = [each for name in THEIRS for each in _ends(percents(name))]
    yield "**Missed:** below 5%", [5, *exposed, 0, 3, statistics.mean(exposed), *most, *others, *_ends(idle)]


def stage_claims() -> Iterable[tuple[str, Iterable[float | str]]]:
    runs = _runs("stage")
    chunked, over, copied, at_once = _puts()
    yield "**Against the strongest", [4, chunked, over, at_once, copied]
    ours, aimed, times = [run["pgas"] for run in runs], (95, 88, 95, 95), (1.35, 2.1, 2.6, 2.2, 8)
    assert all(share >= each for share, each in zip(_column(ours, "fraction_of_limit", 100), aimed, strict=False))
    by_copies = 100 * float(ours[3]["link_bytes"]) / _fastest_copies() / 1e6 / _ms(ours[3])
    reached, *missed = (
        100 - 100 * row_over / each for row_over, each in zip(_column(ours, "speedup"), times, strict=True)
    )
    assert reached < 0
    host_us = [1e3 * float(runs[-1][name]["host_ms"]) for name in ("pgas", "fused")]
    yield "**What was aimed at**", [*aimed, _fastest_copies(), by_copies, *times, *missed, *host_us]
    yield "**What `fused` costs", (100 * abs(_ms(run["fused"]) / _ms(run["pgas"]) - 1) for run in (runs[-1], runs[2]))
    yield "**`nccl`** gains little", _ends(100 * (_ms(run["baseline"]) / _ms(run["nccl"]) - 1) for run in runs)


def backward_claims() -> Iterable[tuple[str, Iterable[float | str]]]:
    rows = [row for row in _read("backward") if row["zipf_alpha"] == "0.0" or row["multi_hot"].startswith("[")]
    over, share = {}, {}
    for name in ("push", "push_exposed"):
        own = [row for row in rows if row["contender"] == name]
        over[name], share[name] = _column(own, "speedup"), _column(own, "fraction_of_limit", 100)
    assert sum(each < 1.5 for each in over["push_exposed"]) == 5, "below 1.5x in five lines"
    assert [each < 75 for each in share["push_exposed"]] == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2 + [
        False
    ] * 2
    hidden, sorting = ([*_ends(over[name]), *_ends(share[name])] for name in over)
    yield "**Aimed at** were", [1.5, 75, *hidden, *sorting[:2], 1.5, *sorting[2:], 75]


def collectives_claims() -> Iterable[tuple[str, Iterable[float | str]]]:
    rows = [row for row in _read("collectives") if row["contender"] == "dma" and row["captured"] == "True"]
    at_192 = [row for row in rows if row["beside"] == "nothing" and row["mb_per_peer"] == "192"]
    yield "**Asked** were", [380, 192, *_column(at_192, "gb_per_s"), 32, 30]


CLAIMS: list[tuple[str, Claims]] = [
    (README, readme_claims),
    (STEP, step_claims),
    (STAGE, stage_claims),
    (BACKWARD, backward_claims),
    ("docs/results/collectives.md", collectives_claims),
]


def _numbers(text: str) -> list[str]:
    """Return the numbers of a text in order, but for those in code, in links' targets and in names."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)*(?:e-\d+)?", text)


def _paragraph(page: str, start: str) -> str:
    """Return the only paragraph, item or line of a table of `page` that begins with `start`."""
    end = r"\n" if start.startswith("|") else r"\n\n|\n- "
    (found,) = re.findall(rf"^{re.escape(start)}.*?(?={end}|\Z)", Path(page).read_text(), re.DOTALL | re.MULTILINE)
    return found


def _shown(value: float | str, like: str) -> str:
    """Return `value` with as many digits as `like` has."""
    if isinstance(value, str):
        return value
    if "e" in like:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize(("page", "claims"), CLAIMS, ids=[page for page, _ in CLAIMS])
def test_the_numbers_of_a_paragraph_are_those_of_the_rows(page: str, claims: Claims) -> None:
    for start, values in claims():
        shown, values = _numbers(_paragraph(page, start)), [*values]
        assert len(shown) == len(values), (start, shown, values)
        assert shown == [_shown(value, like) for value, like in zip(values, shown, strict=True)], start


@pytest.mark.parametrize("phrases", PHRASES, ids=lambda function: function.__name__)
def test_the_pages_say_what_the_rows_give(phrases: Phrases) -> None:
    for page, phrase in phrases():
        said = re.sub(r"\s+", " ", Path(page).read_text())
        assert phrase in said, f"{page} does not say: {phrase}"
