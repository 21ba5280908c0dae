"""What a user can ask of each figure, beside the configuration. Loads no torch: mistakes are reported at once.

A class here is what a figure takes; a field made by `option` is an option on the command line.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_type_hints

from jsonargparse.typing import PositiveFloat, PositiveInt

from dlrm_overlap.bench.concurrent_strategies import check_left_out
from dlrm_overlap.bench.step_contenders import (
    ABLATION,
    STEP_CONTENDERS,
    USUAL,
    check_contenders,
    contender_config,
)
from dlrm_overlap.config import Config, EmbeddingConfig, InputError


def option(default: Any, help: str, **settings: Any) -> Any:
    """Return a field that is also an option; `help` and `settings` are those of the parser's `add_argument`."""
    return field(default=default, metadata={"help": help, **settings})


@dataclass(frozen=True)
class Request:
    """What is asked of a figure. The options that a figure takes are a class below this one."""

    kind: str
    """the figure's name in the registry"""
    output: Path
    """CSV file to append the rows to"""

    output_help: ClassVar[str] = "CSV file to append the rows to"
    lacks_on_cpu: ClassVar[str | None] = None
    """what a CPU lacks that the figure needs, as in "a CPU has no clock"; None where it can be rehearsed on one"""
    needs_peers: ClassVar[bool] = False
    """whether one rank alone has nothing to measure"""

    @classmethod
    def options(cls, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every option of the figure `kind`: its name without dashes, and what `add_argument` takes."""
        for each in fields(cls):
            if each.metadata:
                default = list(each.default) if isinstance(each.default, tuple) else each.default
                yield each.name, {"default": default, **each.metadata}
        yield "output", {"default": f"runs/bench/{kind}.csv", "help": cls.output_help}

    @classmethod
    def read(cls, kind: str, values: Any) -> Self:
        """Return the request that the parsed options `values` make of the figure `kind`.

        Raises:
            InputError: if two options contradict each other, or one contradicts the figure.
        """
        own = {each.name: getattr(values, each.name) for each in fields(cls) if each.metadata}
        own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
        return cls(kind, Path(values.output), **own)

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check what depends on the number of ranks and on their device; needs no process group.

        Raises:
            InputError: naming the key, or because the ranks are on a CPU and the figure needs GPUs, or there is one
                rank and the figure needs peers.
        """
        if device_type == "cpu" and self.lacks_on_cpu:
            raise InputError(f"bench {self.kind}: {self.lacks_on_cpu}; run it on GPUs")
        if world_size == 1 and self.needs_peers:
            raise InputError(f"bench {self.kind}: one rank has nobody to communicate with; add --nproc 2, or more")

    def check_hosts(self, config: Config) -> None:
        """Check that rows will say so where hosts are emulated: only those of `bench stage` do.

        Raises:
            InputError: if this figure's would not.
        """
        hosts = config.embedding.hosts
        if self.kind != "stage" and hosts not in ("auto", 1):
            raise InputError(
                f"embedding.hosts: {hosts} emulated hosts, but the rows of bench {self.kind} would not say so; take "
                f"bench stage, or the contender pgas_graph_2_emulated_hosts of bench step"
            )


@dataclass(frozen=True)
class InputRequest(Request):
    """What is asked of the figure of the input."""

    steps: int = option(200, "timed steps of each kind", type=PositiveInt)

    output_help: ClassVar[str] = "CSV file to append the row to"


@dataclass(frozen=True)
class StepRequest(Request):
    """What is asked of the figure of the whole training step."""

    contenders: tuple[str, ...] = option(USUAL, "who takes part; losses are compared with the first one's", nargs="+")
    steps: int = option(200, "timed steps of each contender", type=PositiveInt)
    batches: int = option(16, "different batches, read once and trained on in turn", type=PositiveInt)
    pinned_host: bool = option(
        False, "time all once more with each rank held to one core, which a busy process shares", action="store_true"
    )
    dense_tflop_per_s: float = option(
        790.0, "of matrix products, for the floor; the default is cuBLAS's best on an H200, bf16", type=PositiveFloat
    )

    def __post_init__(self) -> None:
        check_contenders(self.contenders, STEP_CONTENDERS)

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check that every contender has a configuration, and that the step's bytes can be counted.

        Raises:
            InputError: naming the key.
        """
        if config.embedding.plan == "row_wise":
            raise InputError(
                "embedding.plan: row_wise, but this figure counts the bytes of table-wise and column-wise shards; set "
                "embedding.plan auto"
            )
        for name in self.contenders:
            contender_config(config, STEP_CONTENDERS[name], device_type)


@dataclass(frozen=True)
class AblationRequest(Request):
    """What is asked of the ablation of the whole step."""

    contenders: tuple[str, ...] = option(
        tuple(name for others in ABLATION.values() for name in others),
        "who takes part beside the references torchrec and pgas_graph",
        nargs="+",
    )
    steps: int = option(100, "timed steps of each contender", type=PositiveInt)
    batches: int = option(16, "different batches, read once and trained on in turn", type=PositiveInt)

    def __post_init__(self) -> None:
        check_contenders(self.contenders, {name: others for others in ABLATION.values() for name in others})

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check that every contender and reference has a configuration.

        Raises:
            InputError: naming the key.
        """
        for name in (*ABLATION, *self.contenders):
            contender_config(config, STEP_CONTENDERS[name], device_type)


COLLECTIVE_SIZES_MB = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512)
"""to each peer, as the figure's default; on CPUs COLLECTIVE_TOYS_MB, since each contender keeps room for the largest"""

COLLECTIVE_TOYS_MB = (1, 4)

COLLECTIVE_CONTENDERS = ("nccl", "nccl_registered", "nccl_copy_engines", "dma", "stores", "auto")


@dataclass(frozen=True)
class CollectivesRequest(Request):
    """What is asked of the figure of the collectives."""

    contenders: tuple[str, ...] = option(COLLECTIVE_CONTENDERS, "who takes part; on CPUs those that can", nargs="+")
    operations: tuple[str, ...] = option(("all_to_all",), "all_to_all, all_gather, or both", nargs="+")
    beside: tuple[str, ...] = option(
        ("nothing", "compute"), "nothing, compute (a product of two bf16 matrices of 8192 x 8192), or both", nargs="+"
    )
    sizes_mb: tuple[int, ...] = option(
        (), "to each peer, of 2^20 bytes; none takes 1 to 512, or toys on CPUs", nargs="+", type=PositiveInt
    )
    iterations: int = option(20, "timed calls of each contender at each size", type=PositiveInt)
    store_programs: int = option(64, "programs of the kernel of stores", type=PositiveInt)

    needs_peers = True

    def __post_init__(self) -> None:
        check_contenders(self.contenders, dict.fromkeys(COLLECTIVE_CONTENDERS))
        for option, names, known in (
            ("operations", self.operations, ("all_to_all", "all_gather")),
            ("beside", self.beside, ("nothing", "compute")),
        ):
            if unknown := [name for name in names if name not in known]:
                raise InputError(f"--{option} {unknown[0]}: not known; take some of {', '.join(known)}")

    def sizes_on(self, device_type: str) -> tuple[int, ...]:
        """Return the sizes to measure on such a device, of 2^20 bytes to each peer."""
        return self.sizes_mb or (COLLECTIVE_SIZES_MB if device_type == "cuda" else COLLECTIVE_TOYS_MB)


@dataclass(frozen=True)
class TimelineRequest(Request):
    """What is asked of the figure of a step's timeline, which needs GPUs."""

    contenders: tuple[str, ...] = option(
        ("torchrec", "torchrec_strongest", "pgas_graph"), "whose steps are traced", nargs="+"
    )
    steps: int = option(5, "traced steps of each contender", type=PositiveInt)
    batches: int = option(16, "different batches, read once and trained on in turn", type=PositiveInt)

    output_help: ClassVar[str] = (
        "CSV file to append the rows to; the picture is beside it as .svg, the traces are in a folder of its name"
    )
    lacks_on_cpu: ClassVar[str | None] = "a CPU's trace has no kernels and no streams"

    def __post_init__(self) -> None:
        check_contenders(self.contenders, STEP_CONTENDERS)
        if self.output.suffix != ".csv":
            raise InputError(
                f"--output {self.output}: must end in .csv, since the picture beside it has the same name with another "
                f"ending, and the folder of the traces without one; give one that does"
            )

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check that every contender has a configuration, and that the ranks are on GPUs.

        Raises:
            InputError: naming the key, or because the ranks are on a CPU.
        """
        for name in self.contenders:
            contender_config(config, STEP_CONTENDERS[name], device_type)
        super().check_ranks(config, world_size, device_type)


@dataclass(frozen=True)
class ConcurrentRequest(Request):
    """What is asked of the figure of a computation beside a communication. The configuration plays no part."""

    repetitions: int = option(15, "timed runs of each strategy in each case", type=PositiveInt)
    write_table: str | None = option(None, "JSON file for the table that comm/choose.py chooses by")
    without: tuple[str, ...] = option((), "strategies that are left out", nargs="*")

    needs_peers = True

    def __post_init__(self) -> None:
        check_left_out(self.without)


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
        False, "NCCL's copy engines too, where a rank's tables are like every other's (GPU)", action="store_true"
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
        for name in self.optimizers:
            if name not in known:
                raise InputError(f"--optimizers {name}: not an optimizer of the tables; known: {', '.join(known)}")
        if len(set(self.optimizers)) < len(self.optimizers):
            raise InputError(f"--optimizers {' '.join(self.optimizers)}: one is there twice; name each once")
