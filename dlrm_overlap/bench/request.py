"""What is asked of a benchmark of the embedding stage. Loads no torch: a mistake is told at once."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

from dlrm_overlap.config import Config, EmbeddingConfig, InputError

KINDS = {
    "stage": "all contenders on one shape",
    "weak": "the same on 1, 2, 4, .. ranks; tables of a rank and global batch stay",
    "strong": "the same on 1, 2, 4, .. ranks; tables in all and global batch stay",
    "slice": "fused by slice size, beside pgas",
    "occupancy": "fused by programs a multiprocessor (GPU)",
    "schedule": "pgas and fused by order of the tasks, with the skew between ranks",
    "backward": "gradients in, rows updated: push and atomic against the collective with FBGEMM's update",
}


@dataclass(frozen=True)
class Request:
    """What is asked for, beside the configuration, which gives the shape.

    Raises:
        InputError: if kind and options do not go together.
    """

    kind: str
    """one of KINDS"""
    output: Path
    """CSV file to append the rows to"""
    iterations: int = 100
    """timed steps of each contender"""
    tables_per_rank: int | None = None
    """tables of each rank, in place of data.tables.count in all"""
    check_ids: bool = True
    """bounds checks of ids, the baseline's and the exchanges' alike: on, as in training, or off"""
    optimizers: tuple[str, ...] = ("sgd", "rowwise_adagrad")
    """backward: of the rows, one after the other"""

    def __post_init__(self) -> None:
        known = get_args(get_type_hints(EmbeddingConfig)["optimizer"])
        for name in self.optimizers:
            if name not in known:
                raise InputError(f"--optimizers {name}: not an optimizer of the tables; known: {', '.join(known)}")
        if len(set(self.optimizers)) < len(self.optimizers):
            raise InputError(f"--optimizers {' '.join(self.optimizers)}: one is there twice; name each once")
        given = self.tables_per_rank
        if self.kind == "weak" and given is None:
            raise InputError("--tables_per_rank: not given, but weak scaling keeps the tables of a rank; give it")
        if self.kind == "strong" and given is not None:
            raise InputError(
                f"--tables_per_rank: {given}, but strong scaling keeps the tables in all; set data.tables.count instead"
            )

    def worlds(self, world_size: int) -> list[int]:
        """Return the numbers of ranks to measure on: under weak and strong the powers of two up to all ranks."""
        if self.kind not in ("weak", "strong"):
            return [world_size]
        return [2**n for n in range(world_size.bit_length())]

    def shape(self, config: Config, world_size: int) -> Config:
        """Return `config` with the tables that `world_size` ranks have.

        Raises:
            InputError: if tables or samples do not go round.
        """
        if self.tables_per_rank is not None:
            tables = replace(config.data.tables, count=self.tables_per_rank * world_size)
            config = replace(config, data=replace(config.data, tables=tables))
        elif (count := config.data.tables.number(world_size)) < world_size:
            raise InputError(f"data.tables.count: {count} tables for {world_size} ranks; each takes at least one")
        config.train.samples_per_rank(world_size)
        return config

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check what the number of ranks and their device decide; needs no process group.

        Raises:
            InputError: naming the key.
        """
        if self.kind == "occupancy" and device_type == "cpu":
            raise InputError("bench occupancy: a CPU has no multiprocessors; run it on GPUs")
        for size in self.worlds(world_size):
            self.shape(config, size)
