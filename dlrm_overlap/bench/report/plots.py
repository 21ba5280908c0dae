"""The plots of all figures, each from the rows of `dlrm-overlap bench KIND`, with a table of its numbers.

To add a plot, write a function that draws the rows and one that returns the table, and add a line to PLOTS.
"""

from collections.abc import Callable
from typing import NamedTuple

from dlrm_overlap.bench.report import collective_plots, stage_plots, step_plots
from dlrm_overlap.bench.report.map_plots import MAPS, PAYS
from dlrm_overlap.bench.report.measured import Measured, Table
from dlrm_overlap.bench.report.style import Picture

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


_INPUT = {"cached_median_ms": "one cached batch", "loaded_median_ms": "fed by the loader"}

_BASELINE_STEP = {"step_ms_p50": "p50", "step_ms_p95": "p95"}

_MAP = (
    "Speedup of the faster of pgas and fused over the strongest baseline: FBGEMM, NCCL and unpacking, at once or in 2, "
    f"4 or 8 chunks. Hatched where it is below {PAYS}; in brackets where the host's time to issue the baseline decides."
)

_SLICE = ("slice_bags", "bags a slice")

_OCCUPANCY = ("programs_per_sm", "programs a multiprocessor")

PLOTS = {
    "step": Plot(
        "The whole training step",
        "Median of a step by contender. The line is the floor: the longest of the dense products, the bytes of memory "
        "and the bytes of the links, under the first contender's plan; one that divides dense layers moves other bytes "
        "and may be below it. A dotted bar is of a contender whose losses were not the reference's.",
        "dlrm-overlap bench step --config configs/bench/step_mlperf.yaml --nproc 4",
        step_plots.draw_step,
        step_plots.step_table,
    ),
    "stage": Plot(
        "The embedding stage, forward",
        "Time over the baseline's, FBGEMM + NCCL + unpack: from the ids at the tables' ranks to the pooled embeddings "
        "at the samples' ranks. Outputs were equal before anything was timed. The limit is the bytes over the rate of "
        "copies in memory or over that of the links, the greater; a lookup mostly reads, so it may be a little faster.",
        _STAGE.format("stage"),
        stage_plots.draw_stage,
        stage_plots.stage_table,
    ),
    "backward": Plot(
        "The backward",
        "From gradients to updated rows, over the time of NCCL with FBGEMM's update. Bars beyond 1.6 are cut and have "
        "an arrow. A time may be below the limit, which counts every read of a gradient, also those that the cache "
        "saves.",
        _STAGE.format("backward") + " --iterations 40",
        stage_plots.draw_backward,
        stage_plots.stage_table,
    ),
    "timeline": Plot(
        "Where a step's time goes",
        "Mean of the traced steps on each rank: something computes; only communication runs; only copies; nothing.",
        "dlrm-overlap bench timeline --config configs/bench/step_mlperf.yaml --nproc 4",
        step_plots.draw_timeline,
        step_plots.timeline_table,
    ),
    "ablation": Plot(
        "The step with one thing more or less",
        "How much longer a step takes than that of the reference in the same turns.",
        "dlrm-overlap bench ablation --config configs/bench/step_mlperf.yaml --nproc 4",
        step_plots.draw_ablation,
        step_plots.ablation_table,
    ),
    "weak": Plot(
        "Weak scaling of the embedding stage",
        "Tables of a GPU and global batch stay. Scaling factor: time on one GPU over time on several; 1 is ideal.",
        "dlrm-overlap bench weak --config configs/bench/weak.yaml --tables_per_rank 64 --nproc 4",
        stage_plots.draw_scaling,
        stage_plots.scaling_table,
    ),
    "strong": Plot(
        "Strong scaling of the embedding stage",
        "Tables in all and global batch stay. Scaling factor: time on one GPU over time; the number of GPUs is ideal.",
        "dlrm-overlap bench strong --config configs/bench/strong.yaml --nproc 4",
        stage_plots.draw_scaling,
        stage_plots.scaling_table,
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
        "Time of fused by how many pooled embeddings a slice has.",
        _STAGE.format("slice"),
        stage_plots.draw_setting(*_SLICE),
        stage_plots.setting_table(*_SLICE),
    ),
    "occupancy": Plot(
        "Occupancy of fused",
        "Time of fused by how many of its programs a multiprocessor holds.",
        _STAGE.format("occupancy"),
        stage_plots.draw_setting(*_OCCUPANCY),
        stage_plots.setting_table(*_OCCUPANCY),
    ),
    "programs": Plot(
        "Programs of the persistent kernel",
        "A lane a program of fused on rank 0, from its first task to the end of its wait for the peers' flags.",
        "dlrm-overlap bench programs --config configs/bench/small_batch.yaml --tables_per_rank 16 --nproc 4",
        stage_plots.draw_programs,
        stage_plots.programs_table,
    ),
    "volume": Plot(
        "Communication volume over time",
        "Bytes that leave rank 0 for its peers, by stretches of the stage's time. Of fused they are known task by "
        "task, by the kernel's own clock; those of a baseline are spread evenly over NCCL's kernels, by the profiler.",
        _STAGE.format("volume"),
        stage_plots.draw_volume,
        stage_plots.volume_table,
    ),
    "schedule": Plot(
        "Order of the tasks, and the skew between ranks",
        "Left: time by schedule. Right: by how much the ranks' kernels differ in time, on a logarithmic axis.",
        _STAGE.format("schedule"),
        stage_plots.draw_schedule,
        stage_plots.schedule_table,
    ),
    "collectives": Plot(
        "All-to-all and all-gather by copy engines and by stores",
        "Time over that of NCCL's default by size; what is beyond 1.6 is cut. Beside a product it is the time until "
        "both are done, and the thick line is the product alone. The table has all contenders.",
        "dlrm-overlap bench collectives --config configs/bench/tiny.yaml --operations all_to_all all_gather --nproc 4",
        collective_plots.draw_collectives,
        collective_plots.collectives_table,
    ),
    "concurrent": Plot(
        "A computation beside a communication",
        "Fraction of the ideal speedup by strategy, averaged over a class of cases: 1 hides the shorter of the two.",
        "CUDA_DEVICE_MAX_CONNECTIONS=32 dlrm-overlap bench concurrent --config configs/quickstart.yaml --nproc 4",
        collective_plots.draw_concurrent,
        collective_plots.concurrent_table,
    ),
    "gemm": Plot(
        "Products with their all-gather or reduce-scatter inside",
        "Time over that of the collective and the product one after the other. The thick line is the longer of the "
        "product alone and of its bytes at the rate of the links.",
        "dlrm-overlap bench gemm --config configs/bench/tiny.yaml --nproc 4",
        collective_plots.draw_gemm,
        collective_plots.gemm_table,
    ),
    "input": Plot(
        "The step fed by the loader",
        "Median of a step on one cached batch and on batches that the loader brings.",
        "dlrm-overlap bench input --config configs/mlperf_dcnv2.yaml --data.tables.max_rows 4000000 --nproc 4",
        step_plots.draw_pairs(_INPUT, step_plots.input_label),
        step_plots.pairs_table(_INPUT, step_plots.input_label),
    ),
    "baseline_step": Plot(
        "The baseline's step",
        "TorchRec's pipeline, with the dense part eager or captured.",
        "dlrm-overlap train --config configs/mlperf_dcnv2.yaml --data.tables.max_rows 4000000 --nproc 4",
        step_plots.draw_pairs(_BASELINE_STEP, step_plots.baseline_step_label),
        step_plots.pairs_table(_BASELINE_STEP, step_plots.baseline_step_label),
    ),
}
