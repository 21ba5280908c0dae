"""The plots of all figures, each from the rows of `dlrm-overlap bench KIND`, with a table of its numbers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from dlrm_overlap.bench.report import drawing
from dlrm_overlap.bench.report.concurrent import CLASSES, summarise
from dlrm_overlap.bench.report.drawing import draw_bars
from dlrm_overlap.bench.report.measured import Measured, Row, Run, milliseconds, need, number, runs, shape

_STAGE = "dlrm-overlap bench {} --config configs/bench/dim128.yaml --tables_per_rank 26 --nproc 4"
Table = list[dict[str, Any]]
"""lines, each column -> cell: text, a number, or None"""


class Plot(NamedTuple):
    """A figure in the report."""

    title: str
    reading: str
    """how to read it, in a sentence or two"""
    command: str
    """measures such rows; several shapes are several calls"""
    draw: Callable[[Measured], Figure]
    table: Callable[[Measured], Table]


def _step_label(row: Row) -> str:
    gpus, batch = int(row["world_size"]), int(row["global_batch"])
    pinned = "\nhost short of time" if row.get("pinned_host") == "True" else ""  # in earlier rows
    return f"{row['arch']}, {row['tables']} tables, {row['precision']}\n{gpus} x {batch // gpus} samples{pinned}"


def _input_label(row: Row) -> str:
    return f"{row['backend']}\n{row['data']}\n{row['workers']} workers"


def columns(*names: str) -> Callable[[Measured], Table]:
    """Return the function that makes a line a row: those of the columns `names` that some row has."""

    def table(measured: Measured) -> Table:
        there = [name for name in names if any(row.get(name) for row in measured.rows)]
        return [{name.replace("_", " "): row.get(name) for name in there} for row in measured.rows]

    return table


def by_group(groups: drawing.Groups, label: drawing.Label) -> Callable[[Measured], Table]:
    """Return the function that makes a line a group: its name, and each contender's median."""
    return lambda measured: [
        {"shape": label(next(iter(group.values()))).replace("\n", ", ")}
        | {f"{name}, ms": milliseconds(number(row, "median_ms")) for name, row in group.items()}
        for group in groups(measured.rows)
    ]


def _grouped(
    groups: drawing.Groups, label: drawing.Label, **drawn: Any
) -> tuple[Callable[[Measured], Figure], Callable[[Measured], Table]]:
    """Return the bars and the table of groups of contenders."""
    return partial(draw_bars, groups=groups, label=label, **drawn), by_group(groups, label)


def _each_column(names: Mapping[str, str], scale: float = 1.0) -> drawing.Groups:
    """Return the function that makes a group of each row, with a bar for each of its columns `names`."""
    return lambda rows: [
        {name: {**row, "median_ms": str(need(row, column) * scale)} for column, name in names.items()} for row in rows
    ]


def _by(*names: str) -> drawing.Groups:
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
        {name: {"strategy": line["strategy"], "median_ms": f"{line[name] or 0.0:.4g}"} for name in CLASSES}
        for line in summarise(rows)
    ]


_SUMS = {"torchrec_bytes": "TorchRec", "expected_bytes": "expected", "forward_bytes": "counted"}
_SCALING = _grouped(runs, lambda row: f"{row['world_size']} GPUs", limit="limit_ms")

PLOTS = {
    "step": Plot(
        "The whole training step",
        "Median of a step by contender. The line is the floor: the longest of the dense products, the bytes of memory "
        "and the bytes of the links, under the first contender's plan. A contender whose losses were not the "
        "reference's has no bar.",
        "dlrm-overlap bench step --config configs/bench/step_mlperf.yaml --nproc 4",
        partial(draw_bars, groups=runs, label=_step_label, limit="floor_ms"),
        columns(
            *("contender", "arch", "global_batch", "world_size", "p10_ms", "median_ms", "p90_ms", "floor_ms"),
            *("speedup_over_torchrec", "speedup_over_torchrec_strongest", "agrees"),
        ),
    ),
    "stage": Plot(
        "The embedding stage, forward",
        "Time over the baseline's, FBGEMM + NCCL + unpack: from the ids at the tables' ranks to the pooled embeddings "
        "at the samples' ranks. Outputs were equal before anything was timed. The limit is the bytes over the rate of "
        "copies in memory or over that of the links, the greater; a lookup mostly reads, so it may be a little faster.",
        _STAGE.format("stage"),
        *_grouped(runs, shape, limit="limit_ms", over="baseline"),
    ),
    "backward": Plot(
        "The backward",
        "From gradients to updated rows, over the time of NCCL with FBGEMM's update. A time may be below the limit, "
        "which counts every read of a gradient, also those that the cache saves.",
        _STAGE.format("backward") + " --iterations 40",
        *_grouped(runs, lambda row: f"{shape(row)}\n{row['optimizer']}", limit="limit_ms", over="baseline"),
    ),
    "timeline": Plot(
        "Where a step's time goes",
        "Mean of the traced steps on each rank: something computes; only communication runs; only copies; nothing.",
        "dlrm-overlap bench timeline --config configs/bench/step_mlperf.yaml --nproc 4",
        partial(
            draw_bars,
            groups=_each_column({f"{part}_ms": part for part in ("compute", "exposed", "copying", "idle")}),
            label=lambda row: f"{row['contender'].replace('_', chr(10))}\nrank {row['rank']}",
            columns={"median_ms": "ms a traced step"},
        ),
        columns("contender", "rank", "step_ms", "compute_ms", "exposed_ms", "copying_ms", "idle_ms", "untraced_ms"),
    ),
    "weak": Plot(
        "Weak scaling of the embedding stage",
        "Tables of a GPU and global batch stay: as long on several GPUs as on one is ideal.",
        "dlrm-overlap bench weak --config configs/bench/weak.yaml --tables_per_rank 64 --nproc 4",
        *_SCALING,
    ),
    "strong": Plot(
        "Strong scaling of the embedding stage",
        "Tables in all and global batch stay.",
        "dlrm-overlap bench strong --config configs/bench/strong.yaml --nproc 4",
        *_SCALING,
    ),
    "sweep": Plot(
        "Where it pays",
        "Speedup of the faster of pgas and fused over the strongest baseline: FBGEMM, NCCL and unpacking, at once or "
        f"in 2, 4 or 8 chunks; in brackets below {drawing.PAYS}.",
        "dlrm-overlap bench sweep --config configs/bench/sweep.yaml --tables_per_rank 16 --dims 128 32 512 256 "
        "--global_batches 2048 16384 --pooling_factors 1 8 32 128 --nproc 4",
        drawing.draw_map,
        drawing.map_table,
    ),
    "volume": Plot(
        "Communication volume over time",
        "Bytes that leave rank 0 for its peers, by stretches of the stage's time. Of fused they are known task by "
        "task, by the kernel's own clock; those of a baseline are spread evenly over NCCL's kernels, by the profiler.",
        _STAGE.format("volume"),
        drawing.draw_volume,
        columns("contender", "stage_us", "begin_us", "end_us", "bytes", "gb_per_s", "link_gb_per_s"),
    ),
    "partial_sums": Plot(
        "Bytes of tables that are cut by rows",
        "MB of partial sums that a rank gets from its peers in a forward, counted where they arrive, beside those "
        "of TorchRec's dense reduce-scatter. Of these 1 - (1 - 1/W)^L are expected, the chance that a bag of L ids has "
        "one of an owner's rows. Gradients are as many bytes.",
        "dlrm-overlap bench partial_sums --config configs/bench/tiny.yaml --train.global_batch_size 2048 --nproc 4",
        partial(
            draw_bars,
            groups=_each_column(_SUMS, 1e-6),
            label=lambda row: f"{row['world_size']} ranks\n{row['multi_hot']} ids",
            columns={"median_ms": "MB"},
        ),
        columns("world_size", "multi_hot", "forward_bytes", "backward_bytes", "torchrec_bytes", "expected_bytes"),
    ),
    "collectives": Plot(
        "All-to-all and all-gather by copy engines and by stores",
        "Time over that of NCCL by size. Beside a product it is the time until both are done.",
        "dlrm-overlap bench collectives --config configs/bench/tiny.yaml --operations all_to_all all_gather --nproc 4",
        drawing.draw_collectives,
        by_group(
            lambda rows: _by("operation", "beside", "captured", "mb_per_peer")(drawing.todays(rows)),
            lambda row: f"{row['operation']} beside {row['beside']}, captured {row['captured']}, {row['mb_per_peer']}",
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
        ),
        lambda measured: summarise(measured.rows),
    ),
    "gemm": Plot(
        "Products with their all-gather or reduce-scatter inside",
        "Time over that of the collective and the product one after the other. The thick line is the longer of the "
        "product alone and of its bytes at the rate of the links.",
        "dlrm-overlap bench gemm --config configs/bench/tiny.yaml --nproc 4",
        *_grouped(
            _by("operator", "m", "k", "n"),
            lambda row: f"{row['operator']}\n{row['m']} x {row['k']} x {row['n']}",
            limit="floor_ms",
            over="serial",
        ),
    ),
    "input": Plot(
        "The step fed by the loader",
        "Median of a step on one cached batch and on batches that the loader brings.",
        "dlrm-overlap bench input --config configs/mlperf_dcnv2.yaml --data.tables.max_rows 4000000 --nproc 4",
        *_grouped(
            _each_column({"cached_median_ms": "one cached batch", "loaded_median_ms": "fed by the loader"}),
            _input_label,
        ),
    ),
}
PLOTS["grid"] = PLOTS["sweep"]  # of earlier rows: a sweep of tables and batches
