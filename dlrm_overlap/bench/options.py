"""The figures and their options. Does not import torch, so that mistakes are reported at once.

A figure is an entry of FIGURES and a module in `figures/` with `run(kind, ranks)`, which all ranks call and which
returns the exit code. Options are in `ranks.values`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dlrm_overlap.bench.drift_contenders import DRIFT_CONTENDERS, DRIFT_USUAL
from dlrm_overlap.bench.learning_contenders import LEARNING_CONTENDERS, LEARNING_USUAL
from dlrm_overlap.bench.step_contenders import GROUPS, STEP_CONTENDERS, USUAL
from dlrm_overlap.config import FullPath, NonNegativeInt, PositiveInt, Share

Settings = Mapping[str, Any]  # arguments of the parser's `add_argument`


def _number(default: int | None, help: str) -> Settings:
    return {"type": PositiveInt, "default": default, "help": help}


def _numbers(help: str) -> Settings:
    return {"type": PositiveInt, "nargs": "*", "default": [], "help": help}


def _words(choices: Sequence[str], default: Sequence[str], help: str) -> Settings:
    return {"nargs": "+", "choices": list(choices), "default": list(default), "help": help}


class Figure(NamedTuple):
    summary: str
    options: Mapping[str, Settings]
    module: str
    needs_peers: bool = False
    needs_gpu: bool = False
    measures_time: bool = True


_STEP = {
    "contenders": _words([*STEP_CONTENDERS, *GROUPS], USUAL, "contenders, compared with the first one's losses"),
    "batches": _number(16, "different batches, read once and trained on in turn"),
    "steps": _number(200, "timed steps of each contender, rounded up to a multiple of 4"),
    "at_once": _number(6, "contenders in memory at a time, 2 or more; the last one is in every group"),
    "resume": {"type": bool, "default": False, "help": "skip contenders that have rows in --output"},
    "timeline": {"type": FullPath, "default": None, "help": "CSV file to append a traced step of each contender to"},
}
_ITERATIONS = _number(100, "timed steps of each contender")
_STAGE = {
    "tables_per_rank": _number(None, "tables per rank, instead of data.tables.count in total"),
    "iterations": _ITERATIONS,
}
_SWEEP = _STAGE | {
    "iterations": _number(12, "timed steps of each contender on each shape"),
    "dims": _numbers("dims of the tables (default of each axis: the configuration's value)"),
    "global_batches": _numbers("samples of all ranks"),
    "pooling_factors": _numbers("mean ids per bag, L; bags have 0 to 2 L ids, uniformly distributed"),
}
_OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")
_BACKWARD = _STAGE | {"optimizers": _words(_OPTIMIZERS, _OPTIMIZERS[:2], "optimizers of the rows, measured in turn")}
_DIMS = {"type": PositiveInt, "nargs": "+", "default": [32, 64, 128, 256, 512], "help": "dims of the tables"}
_UPDATE = {
    "poolings": _words(("weighted", "unpooled"), ("weighted", "unpooled"), "weighted sums, or a row for each id"),
    "ids_by": _words(("uniform", "zipf"), ("uniform", "zipf"), "distribution of ids; zipf has the exponent 1.05"),
    "optimizers": _words((*_OPTIMIZERS, "adam"), (*_OPTIMIZERS, "adam"), "optimizers of the rows"),
    "dims": _DIMS,
    "tables": _number(8, "tables"),
    "rows": _number(400_000, "rows of a table"),
    "samples": _number(8192, "samples of a batch"),
    "mean_ids": _number(10, "mean ids of a bag, L; bags have 0 to 2 L ids"),
    "repetitions": _number(10, "timed calls of each contender"),
}
_COLLECTIVES = {
    "sizes_mb": _numbers("MiB to each peer (default: 1 to 512, on CPUs 1 and 4)"),
    "iterations": _number(20, "timed calls of each contender at each size"),
}
_GEMM = {
    "shapes": {
        "nargs": "*",
        "default": [],
        "help": "M x K x N of two layers, such as 4096x12288x49152 (default: those of the documentation)",
    },
    "repetitions": _number(20, "timed calls of each contender"),
}


def _seeded(seeds: str) -> dict[str, Settings]:
    return {
        "seeds": {"type": NonNegativeInt, "nargs": "+", "default": [0, 1, 2], "help": seeds},
        "resume": {"type": bool, "default": False, "help": "skip runs that have rows in --output"},
    }


_LEARNING = {
    "contenders": _words([*LEARNING_CONTENDERS], LEARNING_USUAL, "contenders, compared with the first one"),
    "target_auroc": {"type": Share, "default": None, "help": "AUROC whose first crossing is reported"},
    **_seeded("values of train.seed and, if samples are read from files, of data.seed, which shuffles them"),
}
_DRIFT = {
    "contenders": _words([*DRIFT_CONTENDERS], DRIFT_USUAL, "contenders, compared with the first one"),
    "days": _number(30, "days that the run's steps simulate; each is a window of the metrics"),
    **_seeded("values of train.seed and data.seed"),
}
_INPUT = {"steps": _number(200, "timed steps of each kind")}

FIGURES = {
    "step": Figure("the whole training step under TorchRec and under our backends", _STEP, "step"),
    "stage": Figure("the embedding stage's forward on one shape, all contenders", _STAGE, "stage"),
    "sweep": Figure("where the embedding stage gains: many shapes", _SWEEP, "stage"),
    "backward": Figure("the stage's backward: push against the collective with FBGEMM's update", _BACKWARD, "backward"),
    "update": Figure(
        "the update of table rows on one GPU, nothing exchanged, against FBGEMM's", _UPDATE, "update", needs_gpu=True
    ),
    "collectives": Figure("copies and stores to peers against NCCL's All-to-All", _COLLECTIVES, "collectives", True),
    "gemm": Figure("products with their all-gather or reduce-scatter inside, by each way", _GEMM, "gemm", True),
    "input": Figure("the step fed by the loader, against the step on one cached batch", _INPUT, "input"),
    "learning": Figure(
        "what a model learns under several contenders and seeds", _LEARNING, "learning", measures_time=False
    ),
    "drift": Figure(
        "what a model learns while new ids replace old ones, by ways to give ids their rows",
        _DRIFT,
        "drift",
        measures_time=False,
    ),
    "job": Figure("a whole run of the trainer, with evaluations and saves", {}, "job"),
}


def options_of(kind: str) -> dict[str, Settings]:
    output = {"type": FullPath, "default": f"runs/bench/{kind}.csv", "help": "CSV file to append the rows to"}
    return {**FIGURES[kind].options, "output": output}
