"""Write the tables and the numbers that pages take from measured rows: `python -m tests.pages`.

A page has a table where it has the lines

    <!-- rows: runs stage.csv baseline pgas baseline/pgas -->
    <!-- end -->

The first word names a function of `TABLES`, which gets the others; files are those of `docs/results`. Below the table
stands which rows it is made of. `sentences` gives the numbers of single sentences. `test_pages.py` holds that a run
changes nothing.
"""

import json
import os
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from tests import simulated_pages
from tests.calibration import Row, read_rows
from tests.simulated_pages import FOLDER, Lines, read

PAGES = [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
Run = Mapping[str, Row]
"""contender -> its row"""
_SHAPE = (
    *("arch", "optimizer", "pinned_host", "world_size", "tables"),
    *("rows", "dim", "multi_hot", "zipf_alpha", "global_batch"),
)
REGION = re.compile(r"(<!-- rows: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def runs(rows: Iterable[Row]) -> list[Run]:
    """Return the runs in the file's order: one ends where the shape changes or a contender comes again.

    Contenders of a step take turns in groups, whose rows have `busy_ms`. The last one is in each group, and the run has
    its first row.
    """
    found: list[dict[str, Row]] = []
    last = None
    for row in rows:
        shape = [row.get(name) for name in _SHAPE]
        again = last is not None and row["contender"] in found[-1]
        if shape != last or (again and "busy_ms" not in row):
            found.append({})
        found[-1].setdefault(row["contender"], row)
        last = shape
    return [*found]


def milliseconds(value: float | None) -> str:
    """Return a time in ms as the pages have it: two decimals, three below 1 ms; - for none."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value >= 0.995 else f"{value:.3f}" if value >= 0.01 else f"{value:.2g}"


def runs_of(*names: str) -> list[Run]:
    """Return the runs of some files, in order."""
    return [run for name in names for run in runs(read(name))]


def ms_of(row: Row) -> float:
    return float(row["median_ms"])


def label(row: Row) -> str:
    """Return the shape of an embedding stage's row: tables, batch, ids, and its wire if that is not float32."""
    gpus, rows = int(row["world_size"]), row["rows"]
    size = f"{int(row['tables']) // gpus}x{int(rows) / 1e6:g}M" if rows.isdigit() else f"{row['tables']} unlike tables"
    hot = "multi-hot" if row["multi_hot"].startswith("[") else row["multi_hot"]
    skewed = f", zipf {row['zipf_alpha']}" if float(row.get("zipf_alpha") or 0) else ""
    wire = f", {row['wire_dtype']}" if (row.get("wire_dtype") or "fp32") != "fp32" else ""
    return f"{size}x{row['dim']}, {row['global_batch']}, {hot}{skewed}{wire}"


# Tables


def table_of_runs(*arguments: str) -> Lines:
    """Return a line a run of the files among the arguments, with a cell for each other argument.

    A contender's name gives its median; `A/B` how many times as long A takes as B; `limit` is the hardware's,
    `strongest` the fastest baseline, `chunked` that in chunks. `NAME:gpu_ms` is the GPU's own time.
    """
    files, columns = _split(arguments)
    found = [run for run in runs_of(*files) if all(_has(run, each) for each in columns if "/" not in each)]
    shapes = [next(iter(run.values())) for run in found]
    several = len({row["world_size"] for row in shapes}) > 1
    yield ["ms", *(["GPUs"] if several else []), *(_head(each).replace("/", " / ") for each in columns)]
    for run, first in zip(found, shapes, strict=True):
        ranks = [first["world_size"]] if several else []
        yield [label(first), *ranks, *(_cell(run, each) for each in columns)]


def _head(column: str) -> str:
    own = column.replace(":gpu_ms", "")
    return own if own == column else f"{own}, the GPU's own time"


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    return [each for each in arguments if ".csv" in each], [each for each in arguments if ".csv" not in each]


def _has(run: Run, name: str) -> bool:
    return name.partition(":")[0] in (*run, *_SPECIAL)


def _cell(run: Run, name: str) -> str:
    if "/" in name:
        a, b = (_value(run, each) for each in name.split("/"))
        return f"{a / b:.2f}x"
    return milliseconds(_value(run, name))


def _value(run: Run, name: str) -> float:
    contender, _, column = name.partition(":")
    if contender in _SPECIAL:
        return _SPECIAL[contender](run, column or "median_ms")
    return float(run[contender][column or "median_ms"])


def _fastest(run: Run, time: str, *begins: str) -> float:
    return min(float(row[time]) for name, row in run.items() if name.startswith(begins))


@cache
def best_link_gb_per_s(gpu: str) -> float:
    """Return the greatest rate at which links of a GPU of this model have carried bytes in a figure; 0 for none."""
    rows = [*read("collectives.csv"), *read("four_h100/collectives.csv")]
    return max((float(row["gb_per_s"]) for row in rows if row["gpu"].partition(" x ")[2] == gpu), default=0.0)


def limit_ms(row: Row) -> float:
    """Return the longer of memory's time and the links', each at its best rate: of the run, or known of such links."""
    link_gb_per_s = max(float(row["link_gb_per_s"]), best_link_gb_per_s(row["gpu"].partition(" x ")[2]))
    hbm_ms = float(row["hbm_bytes"]) / float(row["hbm_gb_per_s"]) / 1e6
    return max(hbm_ms, float(row["link_bytes"]) / link_gb_per_s / 1e6 if link_gb_per_s else 0.0)


_SPECIAL: dict[str, Callable[[Run, str], float]] = {
    "limit": lambda run, _: limit_ms(next(iter(run.values()))),
    "strongest": lambda run, time: _fastest(run, time, "baseline", "torchrec", "nccl_chunked"),
    "chunked": lambda run, time: _fastest(run, time, "nccl_chunked"),
}


def table_of_values(column: str, *files: str) -> Lines:
    """Return a line a file: the median of `fused` by the values of a column; no value is as many programs as fit."""
    found = [[row for row in read(name) if row["contender"].startswith("fused")] for name in files]
    values = sorted({row[column] for rows in found for row in rows}, key=lambda value: int(value or 1 << 20))
    yield [f"ms, by {column}", *(value or "as many as fit" for value in values)]
    for rows in found:
        ms = {row[column]: milliseconds(ms_of(row)) for row in rows}
        yield [f"{label(rows[0])}, {rows[0]['world_size']} GPUs", *(ms.get(value, "-") for value in values)]


def table_of_schedules(name: str) -> Lines:
    rows = {(row["contender"], row["schedule"]): row for row in read(name)}
    orders = [order for contender, order in rows if contender == "pgas"]
    yield ["ms; skew between ranks", *(f"`{order}`" for order in orders)]
    for contender in ("pgas", "fused"):
        own = [rows[contender, order] for order in orders]
        yield [f"`{contender}`", *(f"{ms_of(row):.2f}; {float(row['skew_fraction']):.1%}" for row in own)]


def table_of_map(name: str, by: str) -> Lines:
    """Return a line for each value of a column of a map: speedups over the strongest baseline, by both times."""
    rows = read(name)
    yield [by, "shapes", "the GPU's time alone: least, mean, greatest", "as the host issues it"]
    for value in [*dict.fromkeys(row[by] for row in rows), "all"]:
        own = [row for row in rows if value in (row[by], "all")]
        ranges = [_range(speedups(own, time)) for time in ("gpu_ms", "median_ms")]
        yield [value, str(len(speedups(own, "gpu_ms"))), *ranges]


def speedups(rows: Sequence[Row], time: str) -> list[float]:
    """Return of each shape of a map the fastest of ours over the strongest baseline."""
    found = runs(rows)
    return [_SPECIAL["strongest"](run, time) / _fastest(run, time, "pgas", "fused") for run in found]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}x, {statistics.geometric_mean(values):.2f}x, {max(values):.2f}x"


def table_of_backwards(*names: str) -> Lines:
    yield ["ms", "optimizer", "baseline", "`push` (as fast)", "sort inside", "limit (of it)"]
    every = [row for name in names for row in read(name)]
    rows = [row for row in every if row["zipf_alpha"] == "0.0" or row["multi_hot"].startswith("[")]
    baseline, push = [row for row in rows if row["contender"] in ("baseline", "push")], rows
    for first in (row for row in baseline if row["contender"] == "baseline"):
        after = iter(push[push.index(first) :])
        hidden = next(row for row in after if row["contender"] == "push")
        exposed = next(row for row in after if row["contender"] == "push_exposed")
        times = [f"{ms_of(first) / ms_of(row):.2f}x" for row in (hidden, exposed)]
        ms = [milliseconds(ms_of(row)) for row in (first, hidden, exposed)]
        limit = limit_ms(hidden)
        own = [f"{each} ({time})" for each, time in zip(ms[1:], times, strict=True)]
        cells = [ms[0], *own, f"{milliseconds(limit)} ({limit / ms_of(hidden):.0%})"]
        yield [label(first), first["optimizer"], *cells]


def table_of_differences(name: str) -> Lines:
    """Return a line a contender with both times and what it loses of each to `pgas_graph` in the same turns."""
    yield ["ms", "GPU's own", "longer", "by the clock", "longer"]
    rows = read(name)
    found = {
        row["contender"]: [
            (float(row[time]), float(row[time]) - float(_ours_beside(rows, row)[time])) for time in _BOTH
        ]
        for row in rows
        if row["contender"] not in (_OURS, "torchrec")
    }
    for contender, times in sorted(found.items(), key=lambda each: -each[1][1][1]):
        yield [f"`{contender}`", *(text for ms, more in times for text in (milliseconds(ms), f"{more:.2f}"))]


def table_of_collectives(name: str, operation: str, beside: str, captured: str, *sizes: str) -> Lines:
    """Return a line a size, in us: the medians, the faster of copies and stores, and the shortest median over its."""
    rows = [
        row for row in read(name) if (row["operation"], row["beside"], row["captured"]) == (operation, beside, captured)
    ]
    last = "product alone" if beside == "compute" else "its GB/s"
    yield ["us, by MB a peer", *_CARRIERS.values(), "ours", "best / ours", last]
    for size in sizes:
        same = [row for row in rows if row["mb_per_peer"] == size]
        found = {row["contender"]: row for row in same}
        taken = min((found[each] for each in _CARRIERS if each != "nccl"), key=ms_of)
        best = min(map(ms_of, same)) / ms_of(taken)
        value = 1e3 * float(taken["product_ms"]) if beside == "compute" else float(taken["gb_per_s"])
        times = [f"{1e3 * ms_of(found[each]):.0f}" if each in found else "-" for each in _CARRIERS]
        yield [size, *times, f"`{taken['contender']}`", f"{best:.2f}", f"{value:.0f}"]


_CARRIERS = {"nccl": "NCCL", "dma": "`dma`", "stores": "`stores`"}


def table_of_gemm(name: str, operator: str) -> Lines:
    """Return a line a shape, in us; the last columns are the part of the floor, and the speedups, of `auto`."""
    problems: dict[str, dict[str, Row]] = {}
    for row in read(name):
        if row["operator"] == operator:
            problems.setdefault(", ".join(row[each] for each in "mkn"), {})[row["contender"]] = row
    names = list(dict.fromkeys(each for found in problems.values() for each in found))
    if "pushes" in names:  # today's `copies`, beside an earlier one of that name
        names.remove("copies")
    heads = (f"`{each.replace('pushes', 'copies')}`" for each in names)
    yield ["M, K, N", "product", "links", *heads, "of the floor", "over serial, torch"]
    for problem, found in problems.items():
        auto = found["auto"]
        links_us = float(auto["link_bytes"]) / float(auto["link_gb_per_s"]) / 1e3
        times_us = [1e3 * float(auto["gemm_ms"]), links_us, *(1e3 * ms_of(found[each]) for each in names)]
        over = ", ".join(f"{ms_of(found[each]) / ms_of(auto):.2f}x" for each in ("serial", "torch"))
        yield [problem, *(f"{each:.0f}" for each in times_us), f"{float(auto['of_floor']):.0%}", over]


_OURS = "pgas_graph"
_BOTH = ("busy_ms", "median_ms")  # the GPU's own time, and that by the clock


def table_of_headlines(*names: str) -> Lines:
    """Return README's table: a line for each model, with the GPU time and in brackets the wall-clock time."""
    contenders = "TorchRec as users run it", "TorchRec, fastest", "dlrm-overlap"
    yield ["ms a step: GPU time (wall clock)", *contenders, "speedup over the fastest: GPU time", "wall clock"]
    gpus = {name: _gpus(read(name)[0]) for name in names}
    for name in names:
        rows = read(name)
        title = _title(rows[0]) + (f", {gpus[name]}" if len(set(gpus.values())) > 1 else "")
        of = [[row for row in rows if row["contender"] == each] for each in ("torchrec", _OURS)]
        ms = [[_ends([float(row[time]) for row in own]) for time in _BOTH] for own in of]
        ms.insert(1, [milliseconds(float(strongest(rows, time)[time])) for time in _BOTH])
        ratios = [f"{over_strongest(rows, time):.2f}x" for time in _BOTH]
        yield [title, *(f"{busy} ({clock})" for busy, clock in ms), *ratios]


def _title(row: Row) -> str:
    model = "DLRM-DCNv2 (MLPerf), at most 4M rows a table" if row["arch"] == "dcn" else "the same tables, dot products"
    model = "item histories of up to 2048 ids, dim 512" if _has_history(row) else model
    return f"{model}, {int(row['global_batch']) // int(row['world_size'])} samples a GPU, {row['precision']}"


def _gpus(row: Row) -> str:
    return re.sub(r"NVIDIA | \d+GB HBM3", "", row["gpu"])


def _has_history(row: Row) -> bool:
    return "0..2048" in row["multi_hot"]


def strongest(rows: Sequence[Row], time: str) -> Row:
    """Return the row of TorchRec that is fastest by a time, of those whose losses agree."""
    return min(_theirs(rows), key=lambda row: float(row[time]))


def _theirs(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["contender"].startswith("torchrec") and row["agrees"] == "True"]


def over(rows: Sequence[Row], row: Row, time: str) -> float:
    """Return how many times as long as `pgas_graph`, the last in the same turns, a row takes."""
    return float(row[time]) / float(_ours_beside(rows, row)[time])


def _ours_beside(rows: Sequence[Row], row: Row) -> Row:
    return next(each for each in rows[rows.index(row) :] if each["contender"] == _OURS)


def over_strongest(rows: Sequence[Row], time: str) -> float:
    """Return the least of how many times as long as `pgas_graph` a row of TorchRec takes, of those that agree."""
    return min(over(rows, row, time) for row in _theirs(rows))


def table_of_steps(*names: str) -> Lines:
    """Return a line a contender: both times in each file, and in brackets how many times those of `pgas_graph`."""
    files = [read(name) for name in names]
    models = ["history" if _has_history(rows[0]) else rows[0]["arch"] for rows in files]
    if len(set(models)) < len(models):
        models = [f"{int(row['global_batch']) // int(row['world_size'])}, {_gpus(row)}" for row, *_ in files]
    yield ["ms", *(f"{model}: {time}" for model in models for time in ("GPU's own", "by the clock"))]
    for contender in dict.fromkeys(row["contender"] for rows in files for row in rows):
        cells = list[str]()
        for rows in files:
            own = [row for row in rows if row["contender"] == contender]
            for time in _BOTH:
                if not own:
                    cells.append("-")
                    continue
                ms, ratio = _ends([float(row[time]) for row in own]), f"{over(rows, own[0], time):.2f}x"
                if own[0]["agrees"] == "False":
                    ratio = f"losses differ by {float(own[0]['max_difference']):.1e}"
                cells.append(ms if contender == _OURS else f"{ms} ({ratio})")
        yield [f"`{contender}`", *cells]


def _ends(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys([milliseconds(min(values)), milliseconds(max(values))]))


def table_of_jobs(*names: str) -> Lines:
    """Return a line a run of `bench job`, then one for each public record."""
    yield ["a step of training", "samples in it", "ms", "samples a second and GPU"]
    for row in [row for name in names for row in read(name)]:
        title = f"`pgas`, {_gpus(row)}, rows up to {max(json.loads(row['rows'])) // 10**6}M"
        yield [title, row["global_batch"], *_step(float(row["step_ms"]), row["global_batch"], row["world_size"])]
    for each, (gpus, batch, ms) in _RECORDS.items():
        yield [f"HugeCTR, {each}", str(batch), *_step(ms, batch, gpus)]


# Of MLPerf Training's `dlrm_dcnv2` by its logs (mlcommons/training_results_VERSION), training alone: GPUs, the global
# batch, ms a step.
_RECORDS = {
    "8 x H200, HPE, v5.0": (8, 65_536, 3.710),
    "4 x H200 NVL (PCIe, 600 W), Dell, v5.0": (4, 32_768, 3.957),
    "8 x H100, v4.0": (8, 55_296, 3.505),
    "8 x B200, v5.1": (8, 55_296, 2.13),
}


def _step(ms: float, samples: object, gpus: object) -> list[str]:
    return [f"{ms:.3f}", f"{int(str(samples)) / int(str(gpus)) / ms / 1e3:.2f}M"]


TABLES: dict[str, Callable[..., Lines]] = {
    "runs": table_of_runs,
    "values": table_of_values,
    "schedules": table_of_schedules,
    "map": table_of_map,
    "backwards": table_of_backwards,
    "differences": table_of_differences,
    "collectives": table_of_collectives,
    "gemm": table_of_gemm,
    "headlines": table_of_headlines,
    "steps": table_of_steps,
    "jobs": table_of_jobs,
    **simulated_pages.TABLES,
}


def region(page: Path, call: str) -> str:
    """Return what stands between the two comments: the table, and which rows it is made of."""
    name, *arguments = call.split()
    lines = [list(line) for line in TABLES[name](*arguments)]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    table = "\n".join([head, "|---" * len(lines[0]) + "|", *body])
    made_of: dict[str, dict[str, str]] = {}
    for name in (each for each in arguments if each.endswith(".csv")):
        shown = name.rpartition("/")[0] or name  # a folder stands for its files
        made_of.setdefault(origin(name), {})[shown] = f"[{shown}]({os.path.relpath(FOLDER / shown, page.parent)})"
    rows = "; ".join(f"{', '.join(links.values())}: {text}" for text, links in made_of.items())
    return f"{table}\n\nRows: {rows}.\n" if rows else f"{table}\n"


def origin(name: str) -> str:
    """Return the commits that rows name, and what they do not name."""
    rows = read(name)
    commits = sorted({row.get("commit", "") for row in rows} - {""})
    text = f"commit {', '.join(commits)}" if commits else "no commit"
    text = text.replace("-dirty", " with uncommitted changes")
    return text if name.startswith("simulated") or all(row.get("command") for row in rows) else f"{text}, no command"


# Numbers in sentences


def sentences() -> Iterator[tuple[str, str, Sequence[float]]]:
    """Yield a page, a part of a sentence with braces in the place of its numbers, and these."""
    readme, step, stage = "README.md", "docs/results/step.md", "docs/results/stage.md"
    mlperf = read("four_h200/step_mlperf.csv")
    text = "**{:.2f} times as fast as TorchRec's fastest configuration:**"
    yield readme, text, [over_strongest(mlperf, "busy_ms")]
    ours = min(float(row["busy_ms"]) for row in mlperf if row["contender"] == _OURS)
    text = "keeps the GPU busy for {:.2f} ms instead of {:.2f} ms"
    yield readme, text, [ours, float(strongest(mlperf, "busy_ms")["busy_ms"])]
    theirs = {row["contender"] for row in mlperf if "strongest" in row["contender"]}
    yield readme, "the best of {} [TorchRec configurations]", [len(theirs)]
    as_run, drop_in, *_ = mlperf
    found = [float(as_run[time]) / float(drop_in[time]) for time in _BOTH]
    text = "makes the step {:.2f} times as fast as TorchRec's as users run it, and {:.2f} times by"
    yield step, text, found
    (third,) = runs_of("four_h200/stage_dim128.csv")
    copied = _value(third, "pgas_copied")
    text = "it takes {:.2f} ms on the third shape, {:.2f} times as fast as the strongest baseline"
    yield stage, text, [copied, _value(third, "strongest") / copied]
    ratios = [float(run["fused"]["gpu_ms"]) / float(run["pgas"]["gpu_ms"]) for run in runs_of("sweep.csv")]
    text = "takes {:.2f} to {:.2f} times as long in the sweep, {:.2f} in the mean"
    yield stage, text, [min(ratios), max(ratios), statistics.geometric_mean(ratios)]
    grid = speedups(read("grid.csv"), "gpu_ms")
    text = "it is {:.2f}x to {:.2f}x as fast, {:.2f}x in the mean, over {} shapes"
    yield stage, text, [min(grid), max(grid), statistics.geometric_mean(grid), len(grid)]
    backward = [row for path in sorted(FOLDER.glob("four_h200/backward_*.csv")) for row in read_rows(path)]
    exposed, hidden = (
        [float(row["speedup"]) for row in backward if row["contender"] == name] for name in ("push_exposed", "push")
    )
    text = "is {:.2f} to {:.2f} times as fast as NCCL and FBGEMM's update, and {:.1f} to {:.1f} times"
    yield stage, text, [min(exposed), max(exposed), min(hidden), max(hidden)]
    wide = sorted(map(ms_of, read("four_h100/wide.csv")))
    gemm = "docs/results/gemm.md"
    small = {row["contender"]: row for row in read("four_h200/quickstart.csv")}
    both = [[float(small[name][time]) for name in ("torchrec", _OURS)] for time in _BOTH]
    text = "{:.3f} ms and {:.3f} by the GPU's own time, and {:.2f} and {:.3f} by the clock"
    yield step, text, [ms for pair in both for ms in pair]
    yield gemm, "took {:.2f} ms instead of {:.2f}, {:.2f} times as fast", [*wide, wide[1] / wide[0]]
    now = mlperf[-1]
    floors = [100 * float(now[name]) / float(now["busy_ms"]) for name in ("floor_ms", "floor_sum_ms")]
    yield step, "`pgas_graph` reaches {:.0f}% of the former and {:.0f}% of the latter", floors
    plans = [float(row["median_ms"]) for row in mlperf if row["contender"] == "pgas_graph_default_plan"]
    yield step, "takes {:.2f} ms, {:.2f} times as long as under ours", [plans[0], plans[0] / float(now["median_ms"])]
    capped, uncapped = (float(row["step_ms"]) for row in read("four_h200/job.csv"))
    yield step, "takes {:.3f} ms, and {:.3f} where they are capped at 4M", [uncapped, capped]
    yield from simulated_pages.sentences()


def fill(text: str, sentence: str, values: Sequence[float]) -> str:
    """Return `text` with the numbers of a sentence replaced; where the sentence has a space, a line may end.

    Raises:
        ValueError: if the text has no such sentence, or more than one.
    """
    parts = re.split(r"\{[^}]*\}", sentence)
    patterns = [re.escape(part).replace(r"\ ", r"\s+") for part in parts]
    pattern = r"\d+(?:\.\d+)?".join(f"({each})" for each in patterns)
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        raise ValueError(f"{len(found)} sentences like: {sentence}")
    shown = [spec.format(value) for spec, value in zip(re.findall(r"\{[^}]*\}", sentence), values, strict=True)]
    new = "".join(a + b for a, b in zip(found[0].groups(), [*shown, ""], strict=True))
    return text[: found[0].start()] + new + text[found[0].end() :]


@cache
def _all_sentences() -> list[tuple[str, str, Sequence[float]]]:
    return [*sentences()]


def written(page: Path) -> str:
    """Return the text of a page with its tables and numbers made anew."""
    text = REGION.sub(lambda found: f"{found[1]}{region(page, found[2])}{found[3]}", page.read_text())
    for name, sentence, values in _all_sentences():
        if Path(name) == page:
            text = fill(text, sentence, values)
    return text


def main() -> None:
    for page in PAGES:
        text = written(page)
        if text != page.read_text():
            page.write_text(text)
            print(page)


if __name__ == "__main__":
    main()
