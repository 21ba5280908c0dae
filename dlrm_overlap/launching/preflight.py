"""What this machine can refuse before a rank is started: too many processes, batches beyond its memory, a folder that
nothing can be written to. Loads no torch, so that a mistake is told at once.
"""

import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from dlrm_overlap.config import CRITEO_TABLES, Config, InputError, parse_multi_hot

_HELD_BATCHES = 3  # those the loader keeps beyond the ones read ahead
_MOST_PROCESSES = 64  # no host has more GPUs, and each process takes some 0.5 GB before it has read a sample


def check_processes(nproc: int) -> None:
    """Check that `nproc` processes are not far more than this host can run.

    Raises:
        InputError: beyond 4 a core, with 8 on the smallest host, or beyond 64.
    """
    cores = len(os.sched_getaffinity(0))
    most = min(_MOST_PROCESSES, max(8, 4 * cores))
    if nproc > most:
        raise InputError(
            f"--nproc: {nproc} processes are above {most}, the most for the {cores} cores here (4 a core, up to "
            f"{_MOST_PROCESSES}); start one a GPU, or two on a CPU"
        )


def check_memory(config: Config, world_size: int, local_ranks: int) -> None:
    """Check that the batches of this host's ranks fit in its memory, by the least they can take.

    Raises:
        InputError: naming the key that asks for too much.
    """
    train, data = config.train, config.data
    samples = (train.global_batch_size or train.batch_size * world_size) // world_size
    tables = data.tables.number(CRITEO_TABLES)
    specs = data.tables.multi_hot if isinstance(data.tables.multi_hot, list) else [data.tables.multi_hot] * tables
    ids = sum(parse_multi_hot(spec)[1] for spec in specs)
    read_bytes = 4 * samples * (ids + tables + data.dense_features + 1)
    pooled_bytes = 4 * samples * tables * config.model.dim
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ranks = f"{local_ranks} ranks" if local_ranks > 1 else "the one rank"
    here = f"for {ranks} here, and this machine has {memory_bytes / 1e9:.0f} GB of memory"
    if (needed := local_ranks * (read_bytes + pooled_bytes)) > memory_bytes:
        key = "train.global_batch_size" if train.global_batch_size else "train.batch_size"
        raise InputError(
            f"{key}: {samples} samples a rank are {needed / 1e9:.0f} GB of ids, features and pooled embeddings {here}; "
            f"take a smaller one"
        )
    batches = data.prefetch
    if data.workers:
        batches = data.workers * (data.prefetch + math.ceil(_HELD_BATCHES / data.workers))
    if (needed := local_ranks * batches * read_bytes) > memory_bytes:
        raise InputError(
            f"data.prefetch: {data.prefetch}, with data.workers {data.workers}, reads {batches} batches ahead, "
            f"{needed / 1e9:.0f} GB {here}; read less ahead"
        )


def check_resume(config: Config) -> None:
    """Check that `checkpoint.resume` is a word that is known, or a checkpoint.

    Raises:
        InputError: if it is neither.
    """
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not (Path(resume) / "checkpoint.json").is_file():
        raise InputError(
            f"checkpoint.resume: {resume!r} is neither auto nor never nor a checkpoint; give one of the two words, or "
            f"a folder named step_<N>"
        )


def check_runs(config: Config, names: Iterable[str]) -> None:
    """Check that runs of these names can be written to `log.dir`.

    Raises:
        InputError: if it is empty, or one of the folders cannot be written.
    """
    if not config.log.dir:
        raise InputError("log.dir: empty, so runs would lie loose in this folder; name one, or leave it out for runs")
    for name in names:
        check_writable(Path(config.log.dir) / name, "log.dir")


def check_writable(folder: Path, key: str) -> None:
    """Check that `folder`, or the nearest there is above it, is one that files can be written to.

    Raises:
        InputError: naming `key`, if it is not.
    """
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{key}: nothing can be written to {folder} ({reason}); give a folder that is yours") from None


def check_output(path: Path) -> None:
    """Check that rows can be appended to the file `path`.

    Raises:
        InputError: if it is a folder or cannot be written.
    """
    if path.is_dir():
        raise InputError(f"--output: {path} is a folder; name a CSV file, say {path / 'rows.csv'}")
    check_writable(path.parent, "--output")
    if path.exists() and not os.access(path, os.W_OK):
        raise InputError(f"--output: {path} cannot be written; name another file")
