"""What a user can ask of the figures of the embedding stage on one shape. Loads no torch."""

from dataclasses import dataclass, replace
from typing import ClassVar, get_args, get_type_hints

from jsonargparse.typing import PositiveInt

from dlrm_overlap.bench.names import check_names
from dlrm_overlap.bench.request import Request, option
from dlrm_overlap.config import Config, EmbeddingConfig, InputError


@dataclass(frozen=True)
class StageRequest(Request):
    """What is asked of every figure of the embedding stage. The configuration gives the shape."""

    iterations: int = option(100, "timed steps of each contender", type=PositiveInt)
    tables_per_rank: int | None = option(
        None,
        "tables of each rank, instead of data.tables.count in all; the files in configs/bench name theirs",
        type=PositiveInt,
    )

    def worlds(self, world_size: int) -> list[int]:
        """Return the numbers of ranks to measure on, in ascending order; here all ranks alone."""
        return [world_size]

    def shape(self, config: Config, world_size: int) -> Config:
        """Return `config` with the tables that `world_size` ranks have.

        Raises:
            InputError: if there are fewer tables than ranks, or the samples cannot be divided among the ranks.
        """
        if self.tables_per_rank is not None:
            tables = replace(config.data.tables, count=self.tables_per_rank * world_size)
            config = replace(config, data=replace(config.data, tables=tables))
        elif (count := config.data.tables.number(world_size)) < world_size:
            raise InputError(f"data.tables.count: {count} tables for {world_size} ranks; each takes at least one")
        config.train.samples_per_rank(world_size)
        return config

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check also that every number of ranks to measure on has a shape.

        Raises:
            InputError: naming the key, or because the ranks are on a CPU and the figure needs GPUs.
        """
        super().check_ranks(config, world_size, device_type)
        for size in self.worlds(world_size):
            self.shape(config, size)


@dataclass(frozen=True)
class ForwardRequest(StageRequest):
    """What is asked of a figure of the stage's forward."""

    check_ids: bool = option(True, "bounds checks, for all alike", type=bool)
    """whether the baseline and the exchanges check the ids' bounds; training does"""
    beside_product: bool = option(
        False, "time each contender once more beside a matrix product of 8192 x 8192 x 8192", action="store_true"
    )


CHUNKS = (2, 4, 8)
"""of tables, in which a baseline looks up and sends"""


@dataclass(frozen=True)
class EveryoneRequest(ForwardRequest):
    """What is asked of the figure of all contenders on one shape."""

    chunks: tuple[int, ...] = option(
        CHUNKS, "of the baseline in chunks; none leaves it out", nargs="*", type=PositiveInt
    )
    copy_engines: bool = option(
        False, "NCCL in registered memory too, and its copy engines; tables as on every rank (GPU)", action="store_true"
    )

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check also that there are copy engines, and somebody to send to.

        Raises:
            InputError: naming the key.
        """
        super().check_ranks(config, world_size, device_type)
        tables = self.shape(config, world_size).data.tables.number()
        if self.copy_engines and (device_type == "cpu" or world_size == 1 or tables % world_size):
            raise InputError(
                f"--copy_engines: {tables} tables on {world_size} ranks ({device_type}); NCCL's copy engines need "
                f"GPUs, two ranks or more, and as many tables on each"
            )


@dataclass(frozen=True)
class _ScalingRequest(ForwardRequest):
    def worlds(self, world_size: int) -> list[int]:
        """Return the powers of two up to `world_size`."""
        return [2**n for n in range(world_size.bit_length())]


@dataclass(frozen=True)
class WeakRequest(_ScalingRequest):
    """What is asked of weak scaling, which keeps the tables of a rank."""

    def __post_init__(self) -> None:
        if self.tables_per_rank is None:
            raise InputError("--tables_per_rank: not given, but weak scaling keeps the tables of a rank; give it")


@dataclass(frozen=True)
class StrongRequest(_ScalingRequest):
    """What is asked of strong scaling, which keeps the tables of all ranks together."""

    def __post_init__(self) -> None:
        if (given := self.tables_per_rank) is not None:
            raise InputError(
                f"--tables_per_rank: {given}, but strong scaling keeps the tables in all; set data.tables.count instead"
            )


@dataclass(frozen=True)
class OccupancyRequest(ForwardRequest):
    """What is asked of the figure of the occupancy, which needs GPUs."""

    lacks_on_cpu: ClassVar[str | None] = "a CPU has no multiprocessors"


@dataclass(frozen=True)
class ProgramsRequest(StageRequest):
    """What is asked of the figure of the persistent kernel's programs, which needs GPUs."""

    iterations: int = option(10, "steps before the one that is traced", type=PositiveInt)
    programs: int = option(32, "of the kernel, whose tasks are told", type=PositiveInt)

    lacks_on_cpu: ClassVar[str | None] = "a CPU's kernels have no clock"


@dataclass(frozen=True)
class VolumeRequest(StageRequest):
    """What is asked of the figure of the bytes on the links over time, which needs GPUs."""

    iterations: int = option(10, "steps before the one that is recorded", type=PositiveInt)
    bins: int = option(100, "stretches of time that the longest stage is cut into", type=PositiveInt)

    lacks_on_cpu: ClassVar[str | None] = "a CPU's kernels have no clock"
    needs_peers = True


@dataclass(frozen=True)
class BackwardRequest(StageRequest):
    """What is asked of the figure of the backward. Its ids have been checked by the forward."""

    optimizers: tuple[str, ...] = option(
        ("sgd", "rowwise_adagrad"), "of the rows, one after the other: sgd, rowwise_adagrad, adagrad", nargs="+"
    )

    def __post_init__(self) -> None:
        known = get_args(get_type_hints(EmbeddingConfig)["optimizer"])
        check_names("--optimizers", self.optimizers, known, "an optimizer of the tables")
