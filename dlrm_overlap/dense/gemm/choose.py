"""Which way suits a product: as measured on this machine, or else by rates and the order of the parts.

The file of measured choices is written by `tuner.tune`, and read here once for a group and device; a training step
never measures anything. It is JSON, one entry a problem:

    {"all_gather M 32768 N 1024 K 4096 torch.bfloat16 kept": {"way": "copies", "parts": 4, "us": {"copies/4": 575, ..}}}

An all-gather whose rows are kept, as training does, is another problem than one whose rows are not: by `copies` it
takes as long, by `pushes` longer.
"""

import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dlrm_overlap
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm.plan import WHOLE, Part, gathered_parts, halve, head, scattered_parts, turns
from dlrm_overlap.dense.gemm.ways import Problem
from dlrm_overlap.launching import stack
from dlrm_overlap.launching.files import read_file

log = logging.getLogger("dlrm_overlap")

# Four H200s over NVLink, bfloat16. Products: 128 x 256 tiles, 32768 x 1024 x 4096 in 354 us. Links: what copy engines
# carry, 16 and 64 MB to each peer, sent in 151 and 534 us, read in 158 and 561, in four copies each in 35 and 46 more.
_MULTIPROCESSORS, _TILE_ROWS, _TILE_WIDTHS = 132, 128, {256: 1.0, 192: 0.95, 128: 0.85}
_PRODUCT_FLOP_PER_US, _MEMORY_BYTES_PER_US = 800e6, 4.2e6
_SENT_BYTES_PER_US, _SENT_US, _READ_BYTES_PER_US, _READ_US = 394e3, 4.0, 375e3, 5.0
_NCCL_BYTES_PER_US, _NCCL_US = 300e3, 20.0
_CALL_US, _PUBLISH_US, _PART_US = 5.0, 15.0, 3.0
_PASSES = 3  # rows that are published are read, stored in the window, and kept
_FLAG_US = 10.0  # behind the last rows that are sent: their flag, and the kernel that awaits it
_KEPT_SHARE = 0.35  # of copying out what was sent that is seen: 623 us with K 4096 of 32768 rows in two parts


class Choice(NamedTuple):
    """A way, and into how many parts it cuts a rank's rows."""

    way: str
    parts: int = 1

    def __str__(self) -> str:
        """Return it as the operators' argument `way` takes it."""
        return f"{self.way}/{self.parts}"


def key(problem: Problem) -> str:
    """Return what the file calls a problem: bias and activation cost every way the same."""
    kept = " kept" if problem.keep else ""
    return f"{problem.operator} M {problem.rows} N {problem.columns} K {problem.inner} {problem.dtype}{kept}"


def tuned_file(device: torch.device, world_size: int) -> Path:
    """Return where the choices of machines like this one are kept, by GPU, number of ranks and what the times are of.

    With another version of torch, NCCL, Triton or this package `auto` takes another file, or predicts where there is
    none.
    """
    versions = {"dlrm_overlap": dlrm_overlap.__version__, "torch": torch.__version__}
    versions |= {"nccl": stack.nccl_version(), "triton": stack.version_of("triton")}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    parts = [gpu, f"{world_size} ranks", *(f"{package} {version}" for package, version in versions.items() if version)]
    name = re.sub(r"[^\w.+]+", "-", " ".join(["gemm", *parts]))
    return _own_folder() / f"{name}.json"


def _own_folder() -> Path:
    try:
        home = Path.home()
    except RuntimeError:  # a container's user that has none
        home = Path(tempfile.gettempdir())
    return home / ".cache" / "dlrm_overlap"


def check_own(path: Path) -> None:
    """Check that no other user can have put a file at `path`, where that is one of `tuned_file`'s.

    A user without a home, or whose home is `/tmp`, has that folder where everybody may make one of its name.

    Raises:
        InputError: if its folder is a link or not this user's, or others may write to it.
        OSError: if the folder cannot be looked at.
    """
    folder = path.parent
    if folder != _own_folder() or not os.path.lexists(folder):
        return
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(
            f"{folder}: must be a folder, no link, that is this user's and that nobody else can write to, or its file "
            f"of choices could be anybody's; remove it, or make it so (chmod 700)"
        )


def read_tuned(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a file of choices; none if there is no such file, or it is another user's alone.

    Raises:
        InputError: if what is there are no such entries, or another user may have put it there.
    """
    try:
        check_own(path)
        entries = json.loads(read_file(path))
        for entry in entries.values():
            if (type(entry["way"]), type(entry["parts"])) != (str, int):
                raise TypeError(f"way {entry['way']!r}, parts {entry['parts']!r}")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except PermissionError as error:  # a container whose HOME is root's
        log.warning("%s; ways of products are predicted", error)
        return {}
    except InputError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: {error!r}, but it must hold choices of ways; remove it, and tune again") from None
    return entries


def choose(
    problem: Problem, world_size: int, candidates: Iterable[Choice], entries: Mapping[str, Mapping[str, Any]]
) -> Choice:
    """Return the candidate that was measured to be the fastest, or, without an entry, the one predicted to be.

    Args:
        problem: what is to be run.
        world_size: ranks.
        candidates: what can run it, serial among them.
        entries: from `read_tuned`.
    """
    able = list(candidates)
    if entry := entries.get(key(problem)):
        chosen = Choice(entry["way"], entry["parts"])
        if chosen in able:
            return chosen
    return min(able, key=lambda choice: predicted_us(problem, world_size, choice))


def product_us(rows: int, columns: int, inner: int, itemsize: int = 2) -> float:
    """Return how long a product takes: as many tiles at once as there are multiprocessors, or the memory's time.

    Example: 2048 rows, N 1024, K 4096: 16 x 8 tiles of 128 x 128 at once, in 26 us; as 16 x 4 of 128 x 256, on 64 of
    132 multiprocessors, they would take 44.
    """
    elements = rows * (inner + columns) + inner * columns
    by_tile = []
    for width, efficiency in _TILE_WIDTHS.items():
        waves = -(-(-(-rows // _TILE_ROWS) * -(-columns // width)) // _MULTIPROCESSORS)
        by_tile.append(2.0 * waves * _MULTIPROCESSORS * _TILE_ROWS * width * inner / efficiency)
    return max(min(by_tile) / _PRODUCT_FLOP_PER_US, elements * itemsize / _MEMORY_BYTES_PER_US)


def predicted_us(problem: Problem, world_size: int, choice: Choice) -> float:
    """Return how long a call takes, by rates and the order of the parts.

    Example: 4 ranks, an all-gather of 32768 rows of 4096 bfloat16, N 1024. Serial: the product takes 354 us, NCCL 20 us
    and 201 MB at 300 GB/s: 1045 us. Sent whole, the last peer's rows are there after 528 us, and their product takes
    89: 635 us with 18 us between and behind, and 45 more if the rows are kept (by `pushes/1`).
    """
    columns, inner, itemsize = problem.columns, problem.inner, problem.dtype.itemsize
    gathers, rows = problem.operator == "all_gather", problem.rows // world_size
    row_bytes = (inner if gathers else columns) * itemsize
    nccl = _NCCL_US + (world_size - 1) * rows * row_bytes / _NCCL_BYTES_PER_US
    product = product_us(problem.rows, columns, inner, itemsize)
    if choice.way == "serial":
        return product + nccl
    if choice.way == "chunks":  # NCCL's kernels hold multiprocessors
        each = world_size * product_us(rows // choice.parts, columns, inner, itemsize)
        return max(choice.parts * each, nccl) + min(each, nccl / choice.parts) + choice.parts * _NCCL_US
    if not gathers:
        return _scattered_us(problem, world_size, choice.parts, row_bytes)
    return _gathered_us(problem, world_size, choice, row_bytes)


def _gathered_us(problem: Problem, world_size: int, choice: Choice, row_bytes: int) -> float:
    rows, read = problem.rows // world_size, choice.way != "pushes"
    rate, copy_us = (_READ_BYTES_PER_US, _READ_US) if read else (_SENT_BYTES_PER_US, _SENT_US)
    published = _PUBLISH_US + _PASSES * rows * row_bytes / _MEMORY_BYTES_PER_US if read else _CALL_US
    arrived, first = _CALL_US, head(rows, choice.parts)
    if read:
        arrived = _PUBLISH_US + _PASSES * first * row_bytes / _MEMORY_BYTES_PER_US
        parts = gathered_parts(0, world_size, rows, choice.parts)
    else:
        *early, last = turns(0, world_size)
        parts = [Part(range(peer, peer + 1), 0, rows) for peer in early]
        parts += [Part(range(last, last + 1), *piece) for piece in halve(rows, choice.parts)]
    done = published + product_us(rows, problem.columns, problem.inner)
    for part in parts:
        count = len(part.ranks) * (part.end - part.begin)
        if read and part.end > first:
            arrived = max(arrived, published)
        arrived += len(part.ranks) * copy_us + count * row_bytes / rate
        done = max(done, arrived) + _PART_US + product_us(count, problem.columns, problem.inner)
    if read:
        return done + _CALL_US
    kept = _KEPT_SHARE * 2 * problem.rows * row_bytes / _MEMORY_BYTES_PER_US if problem.keep else 0.0
    return done + _FLAG_US + kept + _CALL_US


def _scattered_us(problem: Problem, world_size: int, parts: int, row_bytes: int) -> float:
    rows = problem.rows // world_size
    done = sent = _CALL_US
    arrivals: list[tuple[int, float]] = []
    for part in scattered_parts(0, world_size, rows, parts):
        count = len(part.ranks) * (part.end - part.begin)
        done += _PART_US + product_us(count, problem.columns, problem.inner)
        sent = max(sent, done) + len(part.ranks) * 1.5 * _SENT_US + count * row_bytes / _SENT_BYTES_PER_US
        arrivals.append((part.end - part.begin, sent))
    done += _PART_US + product_us(rows, problem.columns, problem.inner)
    pieces = 1 if parts == WHOLE else len(halve(rows, parts))
    for count, arrived in arrivals[-pieces:]:
        summed = (world_size + 1) * count * row_bytes / _MEMORY_BYTES_PER_US
        done = max(done, arrived) + 2 * _PART_US + summed
    return done + _CALL_US
