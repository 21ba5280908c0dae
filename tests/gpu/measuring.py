"""A command that measures on a rank a GPU, all on this machine, and prints on rank 0."""

import argparse
import os
import sys
from collections.abc import Callable

import torch
import torch.multiprocessing as multiprocessing

from dlrm_overlap.launching.launcher import LOOPBACK, World, free_port
from dlrm_overlap.launching.process_group import find_device, init_process_group

Say = Callable[[str], None]
"""Prints a line, on rank 0 alone."""
Measure = Callable[[World, torch.device, Say], None]
"""What each rank does, under no_grad, in a process group of all ranks."""


def measure_on_gpus(name: str, description: str | None, measure: Measure) -> int:
    """Run `measure` on as many ranks as `--nproc` says; return 2 where there are too few GPUs.

    Args:
        name: of the module that is the command.
        description: of it, for `--help`.
        measure: what each rank does.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("--nproc", type=int, default=2, help="ranks, a GPU each")
    options = parser.parse_args()
    if torch.cuda.device_count() < max(2, options.nproc):
        print(
            f"{name}: {torch.cuda.device_count()} GPUs are there, and {max(2, options.nproc)} must be; "
            f"set --nproc to as many as nvidia-smi shows, two at least",
            file=sys.stderr,
        )
        return 2
    ranks = (options.nproc, free_port(), measure)
    multiprocessing.spawn(_run_rank, ranks, nprocs=options.nproc)  # pyright: ignore
    return 0


def _run_rank(rank: int, world_size: int, port: int, measure: Measure) -> None:
    device, world = find_device("cuda", rank), World(rank, rank, world_size, world_size, LOOPBACK, port, "nproc")
    init_process_group(world, device, 60.0)
    with torch.no_grad():
        measure(world, device, lambda text: print(text, flush=True) if rank == 0 else None)
    sys.stdout.flush()
    os._exit(0)  # with captured graphs alive, the interpreter's own end may hang
