"""The plots of all figures, each from the rows of `dlrm-overlap bench KIND`, with a table of its numbers.

To add a plot, add a line to PLOTS: most are drawn by `draw_bars`, with a table of `columns`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from dlrm_overlap.bench.report import drawing, tables
from dlrm_overlap.bench.report.concurrent import CLASSES, summarise
from dlrm_overlap.bench.report.drawing import draw_bars, each_column, each_row
from dlrm_overlap.bench.report.map_plots import MAPS, PAYS
from dlrm_overlap.bench.report.measured import Measured, Row, Run, Table, need, runs, shape
from dlrm_overlap.bench.report.style import Picture
from dlrm_overlap.bench.report.tables import columns
from dlrm_overlap.bench.step_contenders import ABLATION

_STAGE = "dlrm-overlap bench {} --config configs/bench/dim128.yaml --tables_per_rank 26 --nproc 4"


class Plot(NamedTuple):
    """A figure in the report."""

    title: str
    reading: str
    """how to read it, in a sentence or two"""
    command: str
    """measures such rows; several shapes are several calls"""
    draw: Callable[[Measured], Picture]
    table: Callable[[Measured], Table]
    words: Callable[[Measured], list[str]] = lambda measured: []
    """sentences that the rows bear out, a paragraph each"""


def step_title(row: Row) -> str:
    """Return two or three lines that name the step of a row."""
    gpus, batch = int(row["world_size"]), int(row["global_batch"])
    pinned = "\nhost short of time" if row.get("pinned_host") == "True" else ""
    return f"{row['arch']}, {row['tables']} tables, {row['precision']}\n{gpus} x {batch // gpus} samples{pinned}"


def _in_a_line(label: Callable[[Row], str]) -> Callable[[Row], str]:
    return lambda row: label(row).replace("\n", ", ")


def _with_fastest_chunks(rows: Sequence[Row]) -> list[Run]:
    """Return the runs, each with the fastest of its baselines in chunks alone, without their number in the name."""
    found = []
    for run in runs(rows):
        chunked = [name for name in run if name.startswith("nccl_chunked")]
        best = min(chunked, key=lambda name: need(run[name], "median_ms"), default=None)
        kept = {name: row for name, row in run.items() if name not in chunked or name == best}
        found.append({"nccl_chunked" if name == best else name: row for name, row in kept.items()})
    return found


def _by(*names: str) -> Callable[[Sequence[Row]], list[Run]]:
    """Return the function that groups the contenders of rows that agree in the columns `names`."""

    def group(rows: Sequence[Row]) -> list[Run]:
        found: dict[tuple[str, ...], dict[str, Row]] = {}
        for row in rows:
            found.setdefault(tuple(row[name] for name in names), {})[row["contender"]] = row
        return [*found.values()]

    return group


def _by_class(rows: Sequence[Row]) -> list[Run]:
    """Return the fraction of the ideal of each strategy, by class."""
    return [
        {
            name: {"strategy": line["strategy"], "ideal": "1", "median_ms": f"{line[name] or 0.0:.4g}"}
            for name in CLASSES
        }
        for line in summarise(rows)[:-1]
    ]


def _concurrent_table(measured: Measured) -> Table:
    shown = ("strategy", *CLASSES, "mean_speedup")
    return [{name.replace("_", " "): line[name] for name in shown} for line in summarise(measured.rows)[:-1]]


def _input_label(row: Row) -> str:
    run = f", run {row['run']}" if row.get("run") else ""
    dense = "\ndense part captured" if row["graph_dense"] == "True" else ""
    return f"{row['backend']}{run}{dense}\n{row['data']}\n{row['workers']} workers"


def _dense_label(row: Row) -> str:
    return "dense part captured" if row["graph_dense"] == "True" else "dense part eager"


def _ablated(row: Row) -> str:
    """Return the thing that the contender of a row has more, or less, than its reference."""
    words = ABLATION.get(row["reference"], {}).get(row["contender"])
    return f"{row['reference']} {'with' if row['reference'] == 'torchrec' else 'without'} {words}" if words else "-"


def _ablated_rows(rows: Sequence[Row]) -> Sequence[Run]:
    pairs = {"median_ms": "with the thing, or without it", "reference_ms": "its reference in the same turns"}
    return each_column(pairs)([row for row in rows if row["contender"] != row["reference"]])


def _summed_mb(rows: Sequence[Row]) -> list[Run]:
    found = {"torchrec_bytes": "TorchRec", "expected_bytes": "expected", "forward_bytes": "counted"}
    return [
        {name: {**row, "median_ms": f"{need(row, column) / 1e6}"} for column, name in found.items()} for row in rows
    ]


def _summed_label(row: Row) -> str:
    return f"{row['world_size']} ranks\n{row['multi_hot']} ids"


def _setting_label(column: str) -> Callable[[Row], str]:
    return lambda row: (
        f"{row['contender']}\n{row.get(column) or 'as many as fit' * row['contender'].startswith('fused')}"
    )


def _setting(column: str) -> tuple[Callable[[Measured], Picture], Callable[[Measured], Table]]:
    """Return the plot and the table of a figure that sweeps the setting `column` of fused."""
    shown = ("contender", column, "p10_ms", "median_ms", "p90_ms", "fraction_of_limit", "speedup")
    return partial(draw_bars, groups=each_row, label=_setting_label(column), limit="limit_ms"), columns(*shown)


_SHAPE = "operator", "m", "k", "n"
_SCALING = (
    partial(
        draw_bars,
        groups=runs,
        label=lambda row: f"{row['world_size']} GPUs",
        columns={"median_ms": "ms, median", "scaling_factor": "scaling factor"},
        limit="limit_ms",
    ),
    columns(
        *("world_size", "contender", "median_ms", "scaling_factor", "speedup"),
        *("lookup_ms", "all_to_all_ms", "unpack_ms", "sync_ms"),
    ),
)
_INPUT = {"cached_median_ms": "one cached batch", "loaded_median_ms": "fed by the loader"}
_PERCENTILES = {"step_ms_p50": "p50", "step_ms_p95": "p95"}
_MAP = (
    "Speedup of the faster of pgas and fused over the strongest baseline: FBGEMM, NCCL and unpacking, at once or in 2, "
    f"4 or 8 chunks. Hatched where it is below {PAYS}; in brackets where the host's time to issue the baseline decides."
)

PLOTS = {
    "step": Plot(
        "The whole training step",
        "Median of a step by contender. The line is the floor: the longest of the dense products, the bytes of memory "
        "and the bytes of the links, under the first contender's plan; one that divides dense layers moves other bytes "
        "and may be below it. A dotted bar is of a contender whose losses were not the reference's.",
        "dlrm-overlap bench step --config configs/bench/step_mlperf.yaml --nproc 4",
        partial(draw_bars, groups=runs, label=step_title, limit="floor_ms", limit_name="floor"),
        columns(
            *("contender", "p10_ms", "median_ms", "p90_ms", "floor_ms", "speedup_over_torchrec"),
            *("speedup_over_torchrec_strongest", "agrees"),
            cells={"step": _in_a_line(step_title)},
        ),
    ),
    "stage": Plot(
        "The embedding stage, forward",
        "Time over the baseline's, FBGEMM + NCCL + unpack: from the ids at the tables' ranks to the pooled embeddings "
        "at the samples' ranks. Outputs were equal before anything was timed. The limit is the bytes over the rate of "
        "copies in memory or over that of the links, the greater; a lookup mostly reads, so it may be a little faster.",
        _STAGE.format("stage"),
        partial(draw_bars, groups=_with_fastest_chunks, label=shape, limit="limit_ms", over="baseline"),
        tables.stage_table,
    ),
    "backward": Plot(
        "The backward",
        "From gradients to updated rows, over the time of NCCL with FBGEMM's update. Bars beyond 1.6 are cut and have "
        "an arrow. A time may be below the limit, which counts every read of a gradient, also those that the cache "
        "saves.",
        _STAGE.format("backward") + " --iterations 40",
        partial(
            draw_bars,
            groups=runs,
            label=lambda row: f"{shape(row)}\n{row['optimizer']}".replace(", zipf", "\nzipf"),
            limit="limit_ms",
            over="baseline",
            cut=1.6,
        ),
        tables.stage_table,
    ),
    "timeline": Plot(
        "Where a step's time goes",
        "Mean of the traced steps on each rank: something computes; only communication runs; only copies; nothing.",
        "dlrm-overlap bench timeline --config configs/bench/step_mlperf.yaml --nproc 4",
        drawing.draw_timeline,
        columns("contender", "rank", "step_ms", "compute_ms", "exposed_ms", "copying_ms", "idle_ms", "untraced_ms"),
    ),
    "ablation": Plot(
        "The step with one thing more or less",
        "Median of a step with one thing more or less, beside that of its reference in the same turns.",
        "dlrm-overlap bench ablation --config configs/bench/step_mlperf.yaml --nproc 4",
        partial(draw_bars, groups=_ablated_rows, label=lambda row: row["contender"].replace("_", "\n")),
        columns(
            "contender", "median_ms", "reference", "reference_ms", "over_reference", cells={"what it is": _ablated}
        ),
    ),
    "weak": Plot(
        "Weak scaling of the embedding stage",
        "Tables of a GPU and global batch stay. Scaling factor: time on one GPU over time on several; 1 is ideal.",
        "dlrm-overlap bench weak --config configs/bench/weak.yaml --tables_per_rank 64 --nproc 4",
        *_SCALING,
    ),
    "strong": Plot(
        "Strong scaling of the embedding stage",
        "Tables in all and global batch stay. Scaling factor: time on one GPU over time; the number of GPUs is ideal.",
        "dlrm-overlap bench strong --config configs/bench/strong.yaml --nproc 4",
        *_SCALING,
    ),
    "sweep": Plot(
        "Where it pays: pooling factor, dim and batch",
        _MAP,
        "dlrm-overlap bench sweep --config configs/bench/sweep.yaml --tables_per_rank 16 --nproc 4",
        MAPS["sweep"].draw,
        MAPS["sweep"].table,
        MAPS["sweep"].words,
    ),
    "grid": Plot(
        "Where it pays: batch and tables of a GPU",
        _MAP,
        "dlrm-overlap bench grid --config configs/bench/small_batch.yaml --nproc 4",
        MAPS["grid"].draw,
        MAPS["grid"].table,
        MAPS["grid"].words,
    ),
    "slice": Plot(
        "Slice size of fused",
        "Time of fused by how many pooled embeddings a slice has, and of others.",
        _STAGE.format("slice"),
        *_setting("slice_bags"),
    ),
    "occupancy": Plot(
        "Occupancy of fused",
        "Time of fused by how many of its programs a multiprocessor holds.",
        _STAGE.format("occupancy"),
        *_setting("programs_per_sm"),
    ),
    "programs": Plot(
        "Programs of the persistent kernel",
        "A lane a program of fused on rank 0, from its first task to the end of its wait for the peers' flags.",
        "dlrm-overlap bench programs --config configs/bench/small_batch.yaml --tables_per_rank 16 --nproc 4",
        drawing.draw_programs,
        tables.programs_table,
    ),
    "volume": Plot(
        "Communication volume over time",
        "Bytes that leave rank 0 for its peers, by stretches of the stage's time. Of fused they are known task by "
        "task, by the kernel's own clock; those of a baseline are spread evenly over NCCL's kernels, by the profiler.",
        _STAGE.format("volume"),
        drawing.draw_volume,
        tables.volume_table,
    ),
    "partial_sums": Plot(
        "Bytes of tables that are cut by rows",
        "Bytes of partial sums that a rank gets from its peers in a forward, counted where they arrive, beside those "
        "of TorchRec's dense reduce-scatter. Of these 1 - (1 - 1/W)^L are expected, the chance that a bag of L ids has "
        "one of an owner's rows. Gradients are as many bytes.",
        "dlrm-overlap bench partial_sums --config configs/bench/tiny.yaml --train.global_batch_size 2048 --nproc 4",
        partial(draw_bars, groups=_summed_mb, label=_summed_label, columns={"median_ms": "MB"}),
        columns("world_size", "multi_hot", "forward_bytes", "backward_bytes", "torchrec_bytes", "expected_bytes"),
    ),
    "schedule": Plot(
        "Order of the tasks, and the skew between ranks",
        "Time by schedule, and by how much of it the ranks' own work differs.",
        _STAGE.format("schedule"),
        partial(
            draw_bars,
            groups=each_row,
            label=lambda row: f"{row['contender']}\n{row['schedule']}",
            columns={"median_ms": "ms, median", "skew_fraction": "skew over time"},
            limit="limit_ms",
        ),
        columns("contender", "schedule", "median_ms", "skew_ms", "skew_fraction", "put_us", "wait_us"),
    ),
    "collectives": Plot(
        "All-to-all and all-gather by copy engines and by stores",
        "Time over that of NCCL's default by size; what is beyond 1.6 is cut. Beside a product it is the time until "
        "both are done, and the thick line is the product alone. The table has all contenders.",
        "dlrm-overlap bench collectives --config configs/bench/tiny.yaml --operations all_to_all all_gather --nproc 4",
        drawing.draw_collectives,
        tables.by_contender(
            lambda rows: _by("operation", "beside", "captured", "mb_per_peer")(drawing.todays(rows)),
            *("operation", "beside", "captured", "mb_per_peer", "product_ms"),
        ),
    ),
    "concurrent": Plot(
        "A computation beside a communication",
        "Fraction of the ideal speedup by strategy, averaged over a class of cases: 1 hides the shorter of the two.",
        "CUDA_DEVICE_MAX_CONNECTIONS=32 dlrm-overlap bench concurrent --config configs/quickstart.yaml --nproc 4",
        partial(
            draw_bars,
            groups=_by_class,
            label=lambda row: row["strategy"].replace("_", "\n"),
            columns={"median_ms": "mean fraction of the ideal speedup"},
            limit="ideal",
            limit_name="ideal: the shorter of the two is hidden",
        ),
        _concurrent_table,
    ),
    "gemm": Plot(
        "Products with their all-gather or reduce-scatter inside",
        "Time over that of the collective and the product one after the other. The thick line is the longer of the "
        "product alone and of its bytes at the rate of the links.",
        "dlrm-overlap bench gemm --config configs/bench/tiny.yaml --nproc 4",
        partial(
            draw_bars,
            groups=_by(*_SHAPE),
            label=lambda row: f"{row['operator']}\n{row['m']} x {row['k']} x {row['n']}",
            limit="floor_ms",
            over="serial",
            limit_name="product or links alone",
        ),
        tables.by_contender(_by(*_SHAPE), *_SHAPE, "gemm_ms", "triton_gemm_ms", "communication_ms", "floor_ms"),
    ),
    "input": Plot(
        "The step fed by the loader",
        "Median of a step on one cached batch and on batches that the loader brings.",
        "dlrm-overlap bench input --config configs/mlperf_dcnv2.yaml --data.tables.max_rows 4000000 --nproc 4",
        partial(draw_bars, groups=each_column(_INPUT), label=_input_label),
        columns(*_INPUT, cells={"run": _in_a_line(_input_label)}),
    ),
    "baseline_step": Plot(
        "The baseline's step",
        "TorchRec's pipeline, with the dense part eager or captured.",
        "dlrm-overlap train --config configs/mlperf_dcnv2.yaml --data.tables.max_rows 4000000 --nproc 4",
        partial(draw_bars, groups=each_column(_PERCENTILES), label=_dense_label),
        columns(*_PERCENTILES, cells={"run": _dense_label}),
    ),
}
