"""Each number in README's paragraphs and in those that lead the pages is what the rows give.

A function yields the beginning of a paragraph and all its numbers, in order, from the CSV files in `docs/results`;
shapes, aims and others' records are written out.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from dlrm_overlap.bench.report.concurrent import summarise
from dlrm_overlap.embedding.replicated import MOST_COLUMNS
from tests.conftest import read_table
from tests.published import (
    Row,
    Run,
    column,
    gemm_runs,
    gpu_speedups,
    ms_of,
    over,
    read,
    runs_of,
    serially,
    slowdown_of_few_rows,
)

Claims = Iterator[tuple[str, Iterable[float | str]]]
STEP, COLLECTIVES = "docs/results/step.md", "docs/results/collectives.md"
RUN, STRONGEST, OURS = STEPS = ("torchrec", "torchrec_strongest", "pgas_graph")


def _ends(values: Iterable[float]) -> list[float]:
    values = [*values]
    return [min(values), max(values)]


def _step_runs(samples: int, arch: str = "dcn") -> list[Run]:
    """Return all runs of a step on four GPUs whose hosts are not short of time."""
    shape = {"world_size": "4", "arch": arch, "global_batch": str(4 * samples)}
    found = [run for name in ("step", "ablation", "strategies") for run in runs_of(name)]
    return [run for run in found if shape.items() <= run[RUN].items() and run[RUN].get("pinned_host") != "True"]


def _ms(runs: Iterable[Run], *names: str) -> list[float]:
    return [ms for name in names for ms in sorted(ms_of(run[name]) for run in runs if name in run)]


def _by_the_clock(runs: Iterable[Run]) -> list[float]:
    return sorted(over(run, STRONGEST, OURS) for run in runs if STRONGEST in run)


def _busy(name: str, arch: str) -> list[float]:
    """Return TorchRec's strongest over ours, and of both the ms that the GPU is not idle on the rank with fewest."""
    rows = [row for row in read(name) if row["arch"] == arch]
    busy = [(row["contender"], float(row["step_ms"]) - float(row["idle_ms"])) for row in rows]
    theirs, ours = (min(ms for contender, ms in busy if contender == name) for name in (STRONGEST, OURS))
    return [theirs / ours, theirs, ours]


def _origin(name: str) -> list[str]:
    """Return what a page's first line says of the rows: GPUs, versions."""
    row = read(name)[0]
    versions = (row[each] for each in ("fbgemm", "torchrec", "nccl", "triton"))
    return [row["world_size"], row["torch"].partition("+")[0], *versions]


def _copies() -> float:
    return max(column((row for row in read("collectives") if row["contender"] == "dma"), "gb_per_s"))


def _chunked(*ours: str) -> list[float]:
    (run,) = runs_of("puts")
    return [ms_of(run["nccl_chunked_4"]), *(over(run, "nccl_chunked_4", name) for name in ours)]


def readme() -> Claims:
    yield "Linux, Python", ["3.11", "3.12"]
    yield "The quickstart learns", [0.8, 2, 1]
    runs, twice, dot = _step_runs(8192), _step_runs(16384), _step_runs(2048, "dot")
    clock, (gpu, *_) = _ends(_by_the_clock(runs)), _busy("timeline", "dcn")
    yield "**How much faster is my job?**", [4, 8192, gpu, *clock]
    (eager,) = (row for row in read("ablation") if row["contender"] == "pgas_eager")
    assert (eager["reference"], eager["wire_dtype"]) == (RUN, "bf16"), "on our side only"
    yield "- **The exchange alone**", [float(eager["reference_ms"]) / ms_of(eager)]
    _, swept = gpu_speedups("sweep")
    yield "- **The embedding stage**", [statistics.geometric_mean(swept), len(swept)]
    own = _ms(runs, "torchrec_no_balance")
    yield "**The training step** on", [4, *own]
    ends = (each for name in STEPS for each in _ends(_ms(runs, name) + own * (name == RUN)))
    yield "| MLPerf's DLRM", [4, 8192, *ends, *clock, gpu]
    yield "| the same, 16384", [16384, *_ms(twice, *STEPS), *_by_the_clock(twice)]
    yield "| the same tables, dot", [2048, *_ms(dot, *STEPS), *_by_the_clock(dot), _busy(*TRACED_DOT)[0]]
    yield "HugeCTR's record", [4, float(read_table(STEP, "| | global batch |")[0][2]), 32768, 4, 40]
    yield "**The embedding stage** on", [4, 100]
    yield "That baseline looks up", [*_chunked("pgas", "pgas_copied"), 2, len(swept)]
    rows = read("backward")
    both = ([row for row in rows if row["contender"] == name] for name in ("push_exposed", "push"))
    yield "The backward, from", [each for own in both for each in _ends(column(own, "speedup"))]
    yield "[^limit]:", [100 * _copies() / float(read("stage")[0]["link_gb_per_s"]) - 100]
    stacks = re.findall(r'"(?:torch|fbgemm-gpu(?:-cpu)?)==(\d+\.\d+)', Path("pyproject.toml").read_text())
    torchrec, triton = (read("stage")[0][name] for name in ("torchrec", "triton"))
    yield "- torch 2.11", [*stacks[2:], torchrec, triton[:3], *stacks[:2], stacks[1], "3.11", "3.12"]
    yield "- for `pgas` and `fused`", [64]
    yield "- SGD, Adagrad", [4, MOST_COLUMNS]
    host_us = column((row for row in read("sweep") if row["contender"] == "fused"), "host_ms", 1e3)
    yield "Which one?", [round(statistics.median(host_us), -1)]
    yield "Under each of them", [8192, 512, *sorted(map(ms_of, read("wide"))), 4]


def step() -> Claims:
    first, pinned, twice, *others = runs_of("step")
    runs, ours = _step_runs(8192), first[OURS]
    yield "The whole step of a user", [*_origin("step"), ours["steps"]]
    a_second = float(ours["samples_per_s"]) / 1e6
    yield "ms. Rows of tables", [4, a_second, a_second / 4]
    yield "| `pgas_graph`, 4 x H200, the first", [4, 32768, ms_of(ours), a_second / 4]
    for gpus, samples, ms in ((4, 32768, 3.957), (8, 65536, 3.710)):
        yield f"| HugeCTR, {gpus} x", [gpus, samples, ms, samples / ms / gpus / 1e3]
    yield "The first two are of MLPerf's", [4, 40]
    yield "**Missed:** 1.7x", [1.7, 1.7 - over(twice, STRONGEST, OURS)]
    clocks = [*_by_the_clock(runs), *_by_the_clock(_step_runs(16384))]
    yield "**How far the ratios", [*_ends(_ms(runs, RUN)), *_ms(runs, STRONGEST), *clocks]
    traced = zip(_busy("timeline", "dcn"), _busy(*TRACED_DOT), strict=True)
    yield "**By the GPUs' own", [each for both in traced for each in both]
    planned = [run for run in runs if "torchrec_no_balance" in run]
    bf16 = [run["torchrec_bf16_output"] for run in (first, twice)]
    apart = max(column(bf16, "max_relative_difference"))
    yield "**The plan** is", [*_ms(planned, "torchrec_no_balance", RUN), *map(ms_of, bf16), apart]
    late, theirs = (column((run[name] for run in (first, twice, *others)), "p95_to_median") for name in (OURS, RUN))
    yield "**Steps are alike.**", [95, *_ends(late), max(theirs)]
    yield (
        "**A host short of time",
        [ms_of(pinned[OURS]), *(ms_of(run[n]) for n in STEPS[:2] for run in (pinned, first))],
    )
    floor, floors = (float(ours[name]) for name in ("floor_ms", "floor_sum_ms"))
    yield "**The floor**", [floor, 790, floors, 100 * floor / ms_of(ours), 100 * floors / ms_of(ours)]

    def percents(contender: str, kind: str = "exposed") -> list[float]:
        return column((row for row in read("timeline") if row["contender"] == contender), f"{kind}_fraction", 100)

    exposed, most, idle = (percents(OURS, kind) for kind in ("exposed", "exposed_most", "idle"))
    theirs = [*_ends(percents(RUN)), *_ends(percents(STRONGEST))]
    yield "**Missed:** below 5%", [5, *exposed, 0, 3, statistics.mean(exposed), *most, *theirs, *_ends(idle)]


def stage() -> Claims:
    runs, on_two = runs_of("stage"), column([*read("stage_two_gpus_bf16"), *read("sweep")], "link_gb_per_s")
    yield "4 x H200", [*_origin("stage"), 2, read("stage")[0]["steps"]]
    yield "**The links' ceiling.**", [float(read("stage")[0]["link_gb_per_s"]), 354, _copies(), *_ends(on_two)]
    chunked, times, copied = _chunked("pgas", "pgas_copied")
    yield "**Against the strongest", [4, chunked, times, over(runs_of("puts")[0], "baseline"), copied]
    ours, shares, aimed_at = [run["pgas"] for run in runs], [95, 88, 95, 95], (1.35, 2.1, 2.6, 2.2, 8)
    assert all(each >= share for each, share in zip(column(ours, "fraction_of_limit", 100), shares, strict=False))
    share = 100 * float(ours[3]["link_bytes"]) / _copies() / 1e6 / ms_of(ours[3])
    reached, *missed = (100 - 100 * over(run, "baseline") / each for run, each in zip(runs, aimed_at, strict=True))
    assert reached < 0
    host_us = column((runs[-1][name] for name in ("pgas", "fused")), "host_ms", 1e3)
    yield "**What was aimed at**", [*shares, _copies(), share, *aimed_at, *missed, *host_us]
    slower = _ends(100 * over(run, "fused") - 100 for run in runs)
    (puts,) = runs_of("puts")
    together = float(puts["fused"]["together_ms"]) / float(puts["pgas"]["together_ms"])
    yield "- **In place, missed:**", [over(puts, "fused"), together, 1.03, 1.06]
    yield "- **In chunks**", [float(puts["nccl_chunked_4"]["host_ms"])]
    yield "**What `fused` costs", [-slower[0], slower[1]]
    yield "**`nccl`** gains little", _ends(100 * over(run, "baseline", "nccl") - 100 for run in runs)


def backward() -> Claims:
    rows = [row for row in read("backward") if row["zipf_alpha"] == "0.0" or row["multi_hot"].startswith("[")]
    yield "4 x H200", [*_origin("backward"), rows[0]["steps"]]
    push, exposed = ([row for row in rows if row["contender"] == name] for name in ("push", "push_exposed"))
    times, shares = column(exposed, "speedup"), column(exposed, "fraction_of_limit", 100)
    assert [i for i, each in enumerate(times) if each < 1.5] == [0, 1, 2, 7, 8], "the lines below 1.5x"
    assert [i for i, each in enumerate(shares) if each < 75] == [2, 3, 6, 7], "those below 75%"
    hidden = [*_ends(column(push, "speedup")), *_ends(column(push, "fraction_of_limit", 100))]
    yield "**Aimed at** were", [1.5, 75, *hidden, *_ends(times), 1.5, *_ends(shares), 75]


def collectives() -> Claims:
    rows = [row for row in read("collectives") if (row["contender"], row["captured"]) == ("dma", "True")]
    at_192 = [row for row in rows if (row["beside"], row["mb_per_peer"]) == ("nothing", "192")]
    yield "**Asked** were", [380, 192, *column(at_192, "gb_per_s"), 32, 30]


def figures() -> Claims:
    saved = {name: [100 - 100 / over(run, "baseline", name) for run in runs_of("stage")] for name in ("pgas", "nccl")}
    all_ms = [{name: ms_of(row) for name, row in run.items()} for run in runs_of("stage_two_gpus")[:4]]
    strongest = (min(ms for name, ms in run.items() if name.startswith(BASELINES)) for run in all_ms)
    on_two = [100 - 100 * min(run["pgas"], run["fused"]) / ms for run, ms in zip(all_ms, strongest, strict=True)]
    most = [*_ends(saved["pgas"]), statistics.mean(saved["pgas"]), *_ends(on_two), *_ends(saved["nccl"])]
    yield "| fused embedding and", [25, 35, *most, max(saved["pgas"])]
    at_once, best = ([100 - 100 / each for each in times] for times in gpu_speedups("grid"))
    share = [*_ends(at_once), statistics.mean(at_once), *_ends(best)]
    small, large = _ends(at_once[:4]), _ends(at_once[-4:])  # the map goes by batch
    yield "| | the same by batch", [256, 25, 35, *share, *small, 512, *large, 4096]
    waits = column(read("programs"), "wait_us")
    yield "| | timeline of 32", [32, int(max(waits)) + 1]
    yield "| | between hosts", [31, 58]
    programs = [_swept(name, "programs_per_sm") for name in ("occupancy_many_tables", "occupancy")]
    assert all(min(ms, key=lambda count: ms[count]) == "" for ms in programs), "as many as fit are the fastest"
    own, other = ([ms[""], ms["16"], 16] for ms in programs)
    yield "| | occupancy |", [75, 32, *own, *other]
    four, two, many = (_swept(name, "slice_bags") for name in ("slice", "slice_two_gpus", "slice_many_tables"))
    assert max(four["32"] / min(four.values()), two["8"] / min(two.values())) < 1.01, "gains end at 32, and at 8"
    longer = [100 * ms["4"] / ms["32"] - 100 for ms in (four, two, many)]
    far = 100 * many["128"] / many["32"] - 100
    yield "| | slice size |", [4, 55, 64, 4, longer[0], 32, 32, longer[1], 8, -longer[2], 128, far, 128]
    skew = {(row["schedule"], row["contender"]): row["skew_fraction"] for row in read("schedule")}
    orders = [(order, name) for order in ("linear", "remote_first", "balanced") for name in ("pgas", "fused")]
    yield "| | skew between", [7, 1, *(100 * float(skew[each]) for each in orders)]
    for name, start, theirs in (
        ("weak", "| PGAS retrieval", [2, 4, 2.1, 1.87]),
        ("strong", "| | strong scaling", [2.95, 2.44]),
    ):
        _, two, four = runs_of(name)
        times = [over(run, "baseline") for run in (two, four, runs_of(f"{name}_two_gpus")[-1])]
        hidden, ms = _hidden(four)
        parts = [hidden, ms, 4, ms / (ms - hidden)] if name == "weak" else [*_hidden(two), 2, hidden, ms, 4]
        yield start, [*theirs, *times, 2, *parts]
    fused, baseline = (_sent(name) for name in ("fused", "baseline"))
    yield "| | communication volume", [*fused, baseline[0], baseline[2]]
    numbers = ("fraction_of_ideal", "speedup", "together_ms")
    rows = [{**row, **{name: float(row[name]) for name in numbers}} for row in read("concurrent")]
    ideal = {line["strategy"]: 100 * line["all"] for line in summarise(rows)}
    yield "| ConCCL |", [21, 42, ideal["plain"], ideal["priority"]]
    assert ideal["partition_12"] < ideal["partition_20"]
    yield "| | partitions |", [41, ideal["partition_20"], ideal["partition_28"], 20, 28, 12]
    engines = [ideal[f"dma{name}"] for name in ("", "_aside", "_partition_4", "_partition_12")]
    yield "| | DMA engines", [66, 72, *engines]
    runs, efficiency = gemm_runs("gemm"), {}
    for problem, run in runs.items():
        alone = float(run["auto"]["gemm_ms"])
        efficiency[problem] = 100 - 100 * (ms_of(run["auto"]) - alone) / (serially(run) - alone)
    longer = [each for each, run in runs.items() if float(run["auto"]["gemm_ms"]) > _link_ms(run["auto"])]
    large, small = ([efficiency[each] for each in longer if (each[1] == "1024") == few] for few in (False, True))
    slower = _ends(slowdown_of_few_rows())
    auto = [*_ends(efficiency.values()), 1024, 64, 512, 8192, *slower]
    yield "| Flux |", [37, 93, 512, *auto, *_ends(large), 4096, *_ends(small), 1024]


def _hidden(run: Run) -> list[float]:
    """Return the ms of the baseline's All-to-All and unpacking, and of all of it."""
    return [sum(float(run["baseline"][name]) for name in ("all_to_all_ms", "unpack_ms")), ms_of(run["baseline"])]


def _link_ms(row: Row) -> float:
    return float(row["link_bytes"]) / float(row["link_gb_per_s"]) / 1e6


def _swept(name: str, by: str) -> dict[str, float]:
    """Return the value of the column `by` -> ms of fused; no value stands for as many programs as fit."""
    return {row[by]: ms_of(row) for row in read(name) if row["contender"].startswith("fused")}


def _sent(contender: str) -> list[float]:
    """Return the percents of a contender's time in which it sends, and of the links' rate then: the mean, the most."""
    rows = [row for row in read("volume") if row["contender"] == contender]
    stage_us, link = float(rows[0]["stage_us"]), float(rows[0]["link_gb_per_s"])
    busy_us = sum(float(row["end_us"]) - float(row["begin_us"]) for row in rows if float(row["bytes"]))
    busy_us = min(stage_us, busy_us)  # the last bin ends later
    mean = sum(column(rows, "bytes")) / busy_us / 1e3
    return [100 * busy_us / stage_us, 100 * mean / link, 100 * max(column(rows, "gb_per_s")) / link]


BASELINES = ("baseline", "torchrec", "nccl_chunked")
TRACED_DOT = ("calibration/timeline", "dot")
PAGES: dict[str, Callable[[], Claims]] = {"README.md": readme, STEP: step, COLLECTIVES: collectives}
PAGES |= {"docs/figures.md": figures, "docs/results/stage.md": stage, "docs/results/backward.md": backward}


def _numbers(text: str) -> list[str]:
    """Return the numbers of a text in order, but for those in code, in links' targets and in names."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)*(?:e-\d+)?", text)


def _shown(value: float | str, like: str) -> str:
    """Return `value` with as many digits as `like` has."""
    spec = ".0e" if "e" in like else f".{len(like.partition('.')[2])}f"
    return value if isinstance(value, str) else f"{value:{spec}}".replace("e-0", "e-")


@pytest.mark.parametrize("page", PAGES)
def test_the_numbers_of_a_paragraph_are_those_of_the_rows(page: str) -> None:
    rest = Path(page).read_text()
    for start, values in PAGES[page]():
        end = r"\n" if start.startswith("|") else r"\n\n|\n- |\Z"
        found = re.findall(rf"^{re.escape(start)}.*?(?={end})", rest, re.DOTALL | re.MULTILINE)
        assert len(found) == 1, f"{page} has no paragraph, or more than one, that begins: {start}"
        text = found[0]
        shown, values, rest = _numbers(text), [*values], rest.replace(text, "")
        assert len(shown) == len(values), (start, shown, values)
        assert shown == [_shown(value, like) for value, like in zip(values, shown, strict=True)], start
    if page == "README.md":
        rest = re.sub(r"^Rows:.*?\n\n|^\| \d+ x .*?\n|^\d\.", "", rest, flags=re.DOTALL | re.MULTILINE)
        assert _numbers(rest) == ["1024"], "a number of which the rows say nothing"
