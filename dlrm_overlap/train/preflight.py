"""Reasons to refuse a run before its ranks meet.

Before a rank is started: files that are not there, or a folder that nothing can be written to. On each rank, before the
process group is made: what its device cannot do, and a data set that is too small. This file loads no torch, so that
the first of these mistakes are reported at once.
"""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_overlap.config import Config, DataConfig, InputError

if TYPE_CHECKING:
    import torch

    from dlrm_overlap.data.batch import Dataset

_ON_CPUS = ("sgd", "adagrad", "rowwise_adagrad")  # FBGEMM's optimizers


def check_data(data: DataConfig) -> None:
    """Raise an InputError unless the files that the configuration names are there; each rank looks into them itself."""
    for key, path in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        if data.kind != "synthetic" and path is not None and not os.path.exists(path):
            raise InputError(f"{key}: {path}: no such file or folder on this machine; give one that is there")


def check_writable(folder: Path, key: str) -> None:
    """Raise an InputError unless files can be written to `folder`, or to the nearest above it that is there."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise InputError(
            f"{key}: nothing can be written to {folder} ({error.strerror}); give a folder that is yours"
        ) from None


def check_output(path: Path) -> None:
    """Raise an InputError unless the file `path` can be written."""
    if path.is_dir():
        raise InputError(f"--output: {path} is a folder; name a file in it")
    check_writable(path.parent, "--output")


def check_start(config: Config, device: "torch.device") -> None:
    """Raise an InputError if a key asks a CPU for features of GPUs."""
    gpu_only = {
        "train.precision": (config.train.precision, "tf32", "fp32"),
        "train.graph_dense": (config.train.graph_dense, True, "false"),
        "embedding.plan": (config.embedding.plan, "row_wise", "auto"),
    }
    for key, (value, forbidden, cure) in gpu_only.items():
        if device.type == "cpu" and value == forbidden:
            shown = str(value).lower()
            raise InputError(f"{key}: {shown} needs a GPU, and this run is on a CPU; set --{key} {cure}")
    if device.type == "cpu" and config.embedding.optimizer not in _ON_CPUS:
        raise InputError(
            f"embedding.optimizer: {config.embedding.optimizer} needs a GPU, since FBGEMM has none on a CPU; take "
            f"{', '.join(_ON_CPUS)}"
        )


def total_steps(config: Config, train: "Dataset", world_size: int) -> int:
    """Return the number of training steps: as configured, or the whole global batches that the epochs hold.

    Raises:
        InputError: if the data set is smaller than one global batch, or the run ends before the last step to trace.
    """
    batch = config.train.samples_per_rank(world_size) * world_size
    if train.num_samples is not None and train.num_samples < batch:
        raise InputError(
            f"train.batch_size: a global batch of {batch} samples is more than the {train.num_samples} there are to "
            f"train on; take a smaller one"
        )
    steps = config.train.steps or config.train.epochs * (train.num_samples or 0) // batch
    if (traced := config.log.traced) and traced[-1] > steps:
        raise InputError(
            f"log.trace_first: {traced[0]}, and so steps up to {traced[-1]} are to be traced, but the run ends after "
            f"step {steps}; trace earlier ones"
        )
    return steps
