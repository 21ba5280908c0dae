"""What a user can ask of the figures that measure the embedding stage's forward on a grid of shapes. Loads no torch."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from jsonargparse.typing import PositiveInt

from dlrm_overlap.bench.request import option
from dlrm_overlap.bench.stage_request import CHUNKS, StageRequest
from dlrm_overlap.config import Config, InputError


@dataclass(frozen=True)
class MapRequest(StageRequest):
    """What is asked of a figure that measures many shapes. The configuration gives what they have in common.

    An axis that is not given has the values of `grid`, or on CPUs those of `toys`, which take two ranks a minute.
    """

    grid: ClassVar[Mapping[str, tuple[int, ...]]]
    """option -> what it stands for where it is not given"""
    toys: ClassVar[Mapping[str, tuple[int, ...]]]
    """the same on CPUs"""

    iterations: int = option(12, "timed steps of each contender on each shape", type=PositiveInt)
    chunks: tuple[int, ...] = option(
        CHUNKS, "of the baseline in chunks; none leaves it out", nargs="*", type=PositiveInt
    )
    most_seconds: int | None = option(
        None, "end behind the shape at which so many have passed since the first one began", type=PositiveInt
    )

    def axes(self, device_type: str) -> list[tuple[int, ...]]:
        """Return the values of each axis on such a device, in the order in which they are nested."""
        known = self.grid if device_type == "cuda" else self.toys
        return [getattr(self, name) or values for name, values in known.items()]

    def points(self, config: Config, world_size: int, device_type: str) -> list[Config]:
        """Return the shapes to measure, those with the same tables one after the other.

        Raises:
            InputError: if there are fewer tables than ranks, or the samples cannot be divided among the ranks.
        """
        raise NotImplementedError

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check every shape.

        Raises:
            InputError: naming the key, or because the samples are not synthetic.
        """
        if config.data.kind != "synthetic":
            raise InputError(
                f"data.kind: {config.data.kind}, but bench {self.kind} takes shapes that no file has; set "
                f"data.kind synthetic"
            )
        super().check_ranks(config, world_size, device_type)
        self.points(config, world_size, device_type)


@dataclass(frozen=True)
class SweepRequest(MapRequest):
    """What is asked of the map over pooling factor, dim and batch."""

    pooling_factors: tuple[int, ...] = option(
        (), "mean ids a bag, L; none takes 1 8 32 128, or 1 8 on CPUs", nargs="+", type=PositiveInt
    )
    """bags of a pooling factor L hold 0 to 2 L ids, any number as often"""
    dims: tuple[int, ...] = option(
        (), "of the tables; none takes 128 32 512 256, or 16 32 on CPUs", nargs="+", type=PositiveInt
    )
    global_batches: tuple[int, ...] = option(
        (), "samples of all ranks; none takes 2048 16384, or 256 on CPUs", nargs="+", type=PositiveInt
    )

    grid: ClassVar = {"dims": (128, 32, 512, 256), "global_batches": (2048, 16384), "pooling_factors": (1, 8, 32, 128)}
    toys: ClassVar = {"dims": (16, 32), "global_batches": (256,), "pooling_factors": (1, 8)}

    def points(self, config: Config, world_size: int, device_type: str) -> list[Config]:
        """Return a shape for each dim, batch and pooling factor, in this order.

        Raises:
            InputError: as `MapRequest.points` raises it, or for a dim that is no multiple of 4.
        """
        found = []
        for dim, batch, pooling in itertools.product(*self.axes(device_type)):
            model = replace(config.model, dim=dim, bottom_mlp=[*config.model.bottom_mlp[:-1], dim])
            shape = _resized(replace(config, model=model), batch)
            tables = replace(shape.data.tables, multi_hot=f"0..{2 * pooling}")
            shape = replace(shape, data=replace(shape.data, tables=tables))
            found.append(self.shape(shape, world_size))
        return found


@dataclass(frozen=True)
class GridRequest(MapRequest):
    """What is asked of the map over batch and tables of a rank."""

    tables: tuple[int, ...] = option(
        (), "tables of a rank; none takes 8 16 32 64, or 2 4 on CPUs", nargs="+", type=PositiveInt
    )
    global_batches: tuple[int, ...] = option(
        (), "samples of all ranks; none takes 512 1024 2048 4096, or 128 256 on CPUs", nargs="+", type=PositiveInt
    )

    grid: ClassVar = {"tables": (8, 16, 32, 64), "global_batches": (512, 1024, 2048, 4096)}
    toys: ClassVar = {"tables": (2, 4), "global_batches": (128, 256)}

    def __post_init__(self) -> None:
        if (given := self.tables_per_rank) is not None:
            raise InputError(f"--tables_per_rank: {given}, but the tables of a rank are swept; give --tables instead")

    def points(self, config: Config, world_size: int, device_type: str) -> list[Config]:
        """Return a shape for each number of tables and each batch, in this order.

        Raises:
            InputError: as `MapRequest.points` raises it.
        """
        found = []
        for count, batch in itertools.product(*self.axes(device_type)):
            shape = _resized(config, batch)
            tables = replace(shape.data.tables, count=count * world_size)
            found.append(self.shape(replace(shape, data=replace(shape.data, tables=tables)), world_size))
        return found


def _resized(config: Config, global_batch: int) -> Config:
    return replace(config, train=replace(config.train, global_batch_size=global_batch))
