"""The options of each figure, beside the configuration. Loads no torch, so that mistakes are reported at once.

A class is the options of a figure; a field made by `option` is an option on the command line, and the first line of the
class's docstring is the figure's summary there. The classes come in the order of `registry.FIGURES`, after those that
several figures share.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_type_hints

from dlrm_overlap.bench.concurrent_strategies import all_strategies
from dlrm_overlap.bench.step_contenders import ABLATION, STEP_CONTENDERS, USUAL, contender_config
from dlrm_overlap.config import Config, EmbeddingConfig, InputError, PositiveFloat, PositiveInt

CHUNKS = (2, 4, 8)
"""of tables, in which a baseline looks up and sends"""


def check_names(option: str, names: Sequence[str], known: Collection[str], what: str, once: bool = True) -> None:
    """Check the values of an option.

    Args:
        option: as a user writes it, such as --contenders.
        names: its values.
        known: those that it takes.
        what: each of these is, such as "a contender".
        once: whether none may be there twice.

    Raises:
        InputError: naming the value that is wrong.
    """
    for name in names:
        if name not in known:
            raise InputError(f"{option} {name}: not {what}; known: {', '.join(known)}")
    if once and len(set(names)) < len(names):
        raise InputError(f"{option} {' '.join(names)}: one is there twice; name each once")


def option(default: Any, help: str, **settings: Any) -> Any:
    """Return a field that is also an option; `help` and `settings` are those of the parser's `add_argument`."""
    return field(default=default, metadata={"help": help, **settings})


def _count(default: int | None, help: str) -> Any:
    return option(default, help, type=PositiveInt)


def _counts(default: tuple[int, ...], help: str, nargs: str = "+") -> Any:
    return option(default, help, nargs=nargs, type=PositiveInt)


def _names(default: Collection[str], help: str, nargs: str = "+") -> Any:
    return option(tuple(default), help, nargs=nargs)


def _flag(help: str) -> Any:
    return option(False, help, action="store_true")


@dataclass(frozen=True)
class Request:
    """The options of every figure."""

    kind: str
    """the figure's name in the registry"""
    output: Path
    """CSV file to append the rows to"""

    lacks_on_cpu: ClassVar[str | None] = None
    """why a CPU cannot measure the figure, as in "a CPU has no clock"; None where it can rehearse it"""
    needs_peers: ClassVar[bool] = False
    """whether one rank alone has nothing to measure"""
    makes_shapes: ClassVar[bool] = False
    """whether it changes the configuration's tables or batch, so that samples must be synthetic"""

    @classmethod
    def options(cls, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every option of the figure `kind`: its name without dashes, and the arguments of `add_argument`."""
        for each in fields(cls):
            if each.metadata:
                default = list(each.default) if isinstance(each.default, tuple) else each.default
                yield each.name, {"default": default, **each.metadata}
        yield "output", {"default": f"runs/bench/{kind}.csv", "help": "CSV file to append the rows to"}

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
        """Check the request against the number of ranks and their device; needs no process group.

        Raises:
            InputError: naming the key, or because the figure needs GPUs, or more than one rank.
        """
        if device_type == "cpu" and self.lacks_on_cpu:
            raise InputError(f"bench {self.kind}: {self.lacks_on_cpu}; run it on GPUs")
        if world_size == 1 and self.needs_peers:
            raise InputError(f"bench {self.kind}: one rank has nobody to communicate with; add --nproc 2, or more")
        if self.makes_shapes and config.data.kind != "synthetic":
            raise InputError(
                f"data.kind: {config.data.kind}, but bench {self.kind} takes shapes that no file has; set "
                f"data.kind synthetic"
            )

    def check_hosts(self, config: Config) -> None:
        """Check that rows will say that hosts are emulated: only those of `bench stage` do.

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
    """The step fed by the loader, against the step on one cached batch."""

    steps: int = _count(200, "timed steps of each kind")


@dataclass(frozen=True)
class TrainingRequest(Request):
    """Every figure whose contenders are training runs."""

    contenders: tuple[str, ...]

    known: ClassVar[Collection[str]] = STEP_CONTENDERS
    """names that `contenders` may have"""
    references: ClassVar[Collection[str]] = ()
    """who takes part beside these"""

    def __post_init__(self) -> None:
        check_names("--contenders", self.contenders, self.known, "a contender")

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check also that every contender and reference has a configuration."""
        for name in (*self.references, *self.contenders):
            contender_config(config, STEP_CONTENDERS[name], device_type)
        super().check_ranks(config, world_size, device_type)


_BATCHES = "different batches, read once and trained on in turn"


@dataclass(frozen=True)
class StepRequest(TrainingRequest):
    """The whole training step under TorchRec and under our backends."""

    contenders: tuple[str, ...] = _names(USUAL, "who takes part; losses are compared with the first one's")
    steps: int = _count(200, "timed steps of each contender")
    batches: int = _count(16, _BATCHES)
    pinned_host: bool = _flag("time all once more with each rank held to one core, which a busy process shares")
    dense_tflop_per_s: float = option(
        790.0, "of matrix products, for the floor; the default is cuBLAS's best on an H200, bf16", type=PositiveFloat
    )


_ABLATED = tuple(name for others in ABLATION.values() for name in others)


@dataclass(frozen=True)
class AblationRequest(TrainingRequest):
    """The whole step with one thing more or less."""

    contenders: tuple[str, ...] = _names(_ABLATED, "who takes part beside the references torchrec and pgas_graph")
    steps: int = _count(100, "timed steps of each contender")
    batches: int = _count(16, _BATCHES)

    known = _ABLATED
    references = ABLATION


@dataclass(frozen=True)
class TimelineRequest(TrainingRequest):
    """What of a traced step is exposed communication, with a picture and the traces beside the rows (GPU)."""

    contenders: tuple[str, ...] = _names(("torchrec", "torchrec_strongest", "pgas_graph"), "whose steps are traced")
    steps: int = _count(5, "traced steps of each contender")
    batches: int = _count(16, _BATCHES)

    lacks_on_cpu: ClassVar[str | None] = "a CPU's trace has no kernels and no streams"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output.suffix != ".csv":
            raise InputError(
                f"--output {self.output}: must end in .csv, since the picture beside it has the same name with another "
                f"ending, and the folder of the traces without one; give one that does"
            )


@dataclass(frozen=True)
class StageRequest(Request):
    """Every figure of the embedding stage. The configuration gives the shape."""

    iterations: int = _count(100, "timed steps of each contender")
    tables_per_rank: int | None = _count(
        None, "tables of each rank, instead of data.tables.count in all; the files in configs/bench name theirs"
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
            config = with_tables(config, count=self.tables_per_rank * world_size)
        elif (count := config.data.tables.number(world_size)) < world_size:
            raise InputError(f"data.tables.count: {count} tables for {world_size} ranks; each takes at least one")
        config.train.samples_per_rank(world_size)
        return config

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check also that every number of ranks to measure on has a shape."""
        super().check_ranks(config, world_size, device_type)
        for size in self.worlds(world_size):
            self.shape(config, size)


def with_tables(config: Config, **keys: Any) -> Config:
    """Return `config` with other keys of `data.tables`."""
    return replace(config, data=replace(config.data, tables=replace(config.data.tables, **keys)))


@dataclass(frozen=True)
class ForwardRequest(StageRequest):
    """Every figure of the stage's forward on one shape."""

    check_ids: bool = option(True, "bounds checks, for all alike", type=bool)
    """whether the baseline and the exchanges check the ids' bounds; training does"""
    beside_product: bool = _flag("time each contender once more beside a matrix product of 8192 x 8192 x 8192")


@dataclass(frozen=True)
class SliceRequest(ForwardRequest):
    """The embedding stage of fused by slice size, beside pgas."""


@dataclass(frozen=True)
class ScheduleRequest(ForwardRequest):
    """The embedding stage of pgas and fused by order of the tasks, with the skew between ranks."""


@dataclass(frozen=True)
class EveryoneRequest(ForwardRequest):
    """The embedding stage's forward on one shape, all contenders."""

    chunks: tuple[int, ...] = _counts(CHUNKS, "of the baseline in chunks; none leaves it out", nargs="*")


@dataclass(frozen=True)
class _ScalingRequest(ForwardRequest):
    def worlds(self, world_size: int) -> list[int]:
        """Return the powers of two up to `world_size`."""
        return [2**n for n in range(world_size.bit_length())]


@dataclass(frozen=True)
class WeakRequest(_ScalingRequest):
    """The embedding stage on 1, 2, 4, .. ranks; tables of a rank and global batch stay."""

    def __post_init__(self) -> None:
        if self.tables_per_rank is None:
            raise InputError("--tables_per_rank: not given, but weak scaling keeps the tables of a rank; give it")


@dataclass(frozen=True)
class StrongRequest(_ScalingRequest):
    """The embedding stage on 1, 2, 4, .. ranks; tables in all and global batch stay."""

    def __post_init__(self) -> None:
        if (given := self.tables_per_rank) is not None:
            raise InputError(
                f"--tables_per_rank: {given}, but strong scaling keeps the tables in all; set data.tables.count instead"
            )


@dataclass(frozen=True)
class MapRequest(StageRequest):
    """`bench sweep` and `bench grid`, which measure many shapes. The configuration gives the keys that these share.

    An axis that is not given has the values of `grid`, or on CPUs those of `toys`, which take two ranks a minute.
    """

    makes_shapes = True
    grid: ClassVar[Mapping[str, tuple[int, ...]]]
    """option -> its values where it is not given"""
    toys: ClassVar[Mapping[str, tuple[int, ...]]]
    """the same on CPUs"""

    iterations: int = _count(12, "timed steps of each contender on each shape")
    chunks: tuple[int, ...] = _counts(CHUNKS, "of the baseline in chunks; none leaves it out", nargs="*")
    most_seconds: int | None = _count(
        None, "end after the shape at which so many have passed since the first one began"
    )

    def points(self, config: Config, world_size: int, device_type: str) -> list[Config]:
        """Return the shapes to measure: all values of the axes, nested in the order of `grid`.

        Raises:
            InputError: if there are fewer tables than ranks, or the samples cannot be divided among the ranks.
        """
        axes = self.grid if device_type == "cuda" else self.toys
        values = itertools.product(*(getattr(self, name) or usual for name, usual in axes.items()))
        return [self.shape(self.point(config, world_size, *each), world_size) for each in values]

    @staticmethod
    def point(config: Config, world_size: int, *values: int) -> Config:
        """Return `config` with these values of the axes."""
        raise NotImplementedError

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check also every shape."""
        super().check_ranks(config, world_size, device_type)
        self.points(config, world_size, device_type)


def _resized(config: Config, global_batch: int) -> Config:
    return replace(config, train=replace(config.train, global_batch_size=global_batch))


@dataclass(frozen=True)
class SweepRequest(MapRequest):
    """Where the embedding stage gains: a map over pooling factor, dim and batch.

    Bags of a pooling factor L hold 0 to 2 L ids, any number as often.
    """

    pooling_factors: tuple[int, ...] = _counts((), "mean ids a bag, L; none takes 1 8 32 128, or 1 8 on CPUs")
    dims: tuple[int, ...] = _counts((), "of the tables; none takes 128 32 512 256, or 16 32 on CPUs")
    global_batches: tuple[int, ...] = _counts((), "samples of all ranks; none takes 2048 16384, or 256 on CPUs")

    grid: ClassVar = {"dims": (128, 32, 512, 256), "global_batches": (2048, 16384), "pooling_factors": (1, 8, 32, 128)}
    toys: ClassVar = {"dims": (16, 32), "global_batches": (256,), "pooling_factors": (1, 8)}

    @staticmethod
    def point(config: Config, world_size: int, *values: int) -> Config:
        """Return `config` with a dim, a global batch and a pooling factor."""
        dim, batch, pooling = values
        model = replace(config.model, dim=dim, bottom_mlp=[*config.model.bottom_mlp[:-1], dim])
        return with_tables(_resized(replace(config, model=model), batch), multi_hot=f"0..{2 * pooling}")


@dataclass(frozen=True)
class GridRequest(MapRequest):
    """Where the embedding stage gains: a map over batch and tables of a rank."""

    tables: tuple[int, ...] = _counts((), "tables of a rank; none takes 8 16 32 64, or 2 4 on CPUs")
    global_batches: tuple[int, ...] = _counts(
        (), "samples of all ranks; none takes 512 1024 2048 4096, or 128 256 on CPUs"
    )

    grid: ClassVar = {"tables": (8, 16, 32, 64), "global_batches": (512, 1024, 2048, 4096)}
    toys: ClassVar = {"tables": (2, 4), "global_batches": (128, 256)}

    def __post_init__(self) -> None:
        if (given := self.tables_per_rank) is not None:
            raise InputError(f"--tables_per_rank: {given}, but the tables of a rank are swept; give --tables instead")

    @staticmethod
    def point(config: Config, world_size: int, *values: int) -> Config:
        """Return `config` with a number of tables of a rank and a global batch."""
        count, batch = values
        return with_tables(_resized(config, batch), count=count * world_size)


@dataclass(frozen=True)
class OccupancyRequest(ForwardRequest):
    """The embedding stage of fused by programs a multiprocessor (GPU)."""

    lacks_on_cpu: ClassVar[str | None] = "a CPU has no multiprocessors"


@dataclass(frozen=True)
class ProgramsRequest(StageRequest):
    """When the persistent kernel's programs pool, put and wait, task by task (GPU)."""

    iterations: int = _count(10, "steps before the one that is traced")

    lacks_on_cpu: ClassVar[str | None] = "a CPU's kernels have no clock"


@dataclass(frozen=True)
class VolumeRequest(StageRequest):
    """Bytes on the links over time, of fused and of the baselines (GPU)."""

    iterations: int = _count(10, "steps before the one that is recorded")
    bins: int = _count(100, "stretches of time that the longest stage is cut into")

    lacks_on_cpu: ClassVar[str | None] = "a CPU's kernels have no clock"
    needs_peers = True


@dataclass(frozen=True)
class PartialSumsRequest(Request):
    """Bytes of partial sums and of their gradients, of tables that are cut by rows over all ranks."""

    pooling_factors: tuple[int, ...] = _counts((1, 2, 8, 32), "ids of every bag, L")

    needs_peers = makes_shapes = True

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check also that the samples can be divided among the ranks."""
        super().check_ranks(config, world_size, device_type)
        config.train.samples_per_rank(world_size)


@dataclass(frozen=True)
class BackwardRequest(StageRequest):
    """The embedding stage's backward: push and atomic against the collective with FBGEMM's update.

    The forward has checked its ids.
    """

    optimizers: tuple[str, ...] = _names(
        ("sgd", "rowwise_adagrad"), "of the rows, one after the other: sgd, rowwise_adagrad, adagrad"
    )

    def __post_init__(self) -> None:
        known = get_args(get_type_hints(EmbeddingConfig)["optimizer"])
        check_names("--optimizers", self.optimizers, known, "an optimizer of the tables")


_SIZES_MB = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512), "cpu": (1, 4)}  # each contender has room for all
_COLLECTIVES = ("nccl", "nccl_registered", "nccl_copy_engines", "dma", "stores", "auto")


@dataclass(frozen=True)
class CollectivesRequest(Request):
    """All-to-all and all-gather by copy engines and by stores, against NCCL's."""

    contenders: tuple[str, ...] = _names(_COLLECTIVES, "who takes part; on CPUs those that can")
    operations: tuple[str, ...] = _names(("all_to_all",), "all_to_all, all_gather, or both")
    sizes_mb: tuple[int, ...] = _counts((), "to each peer, of 2^20 bytes; none takes 1 to 512, or toys on CPUs")
    iterations: int = _count(20, "timed calls of each contender at each size")
    store_programs: int = _count(64, "programs of the kernel of stores")

    needs_peers = True

    def __post_init__(self) -> None:
        check_names("--contenders", self.contenders, _COLLECTIVES, "a contender")
        check_names("--operations", self.operations, ("all_to_all", "all_gather"), "an operation", once=False)

    def sizes_on(self, device_type: str) -> Sequence[int]:
        """Return the sizes to measure on such a device, of 2^20 bytes to each peer."""
        return self.sizes_mb or _SIZES_MB[device_type]


@dataclass(frozen=True)
class ConcurrentRequest(Request):
    """A computation beside a communication that does not depend on it, by each way to issue the two.

    The configuration plays no part.
    """

    repetitions: int = _count(15, "timed runs of each strategy in each pair")
    without: tuple[str, ...] = _names((), "strategies that are left out", nargs="*")
    captured: bool = _flag("time pieces of work that are captured in CUDA graphs, as a step is (GPU)")
    most_seconds: int | None = _count(
        None, "end after the communication at which so many have passed; small ones come first"
    )

    needs_peers = True

    def __post_init__(self) -> None:
        known = dict.fromkeys(strategy.name for strategy in all_strategies())
        check_names("--without", self.without, known, "a strategy", once=False)
        if known.keys() <= set(self.without):
            raise InputError("--without: every strategy is left out; leave one in")


_GEMM_SHAPES = {
    "cuda": (
        *("1024x12288x49152", "4096x12288x49152", "8192x12288x49152", "8192x4096x4096", "32768x4096x4096"),
        *("32768x3456x1024", "32768x1024x1024"),
    ),
    "cpu": ("64x48x96", "128x48x96"),
}
_GEMM_CONTENDERS = ("serial", "torch", "copies", "pushes", "tiles", "triggered", "auto")


@dataclass(frozen=True)
class GemmRequest(Request):
    """Products with their all-gather or reduce-scatter inside, by each way to do it."""

    shapes: tuple[str, ...] = _names(
        (), "M x K x N of two layers, such as 4096x12288x49152; none takes those of wide layers, or toys"
    )
    operators: tuple[str, ...] = _names(("all_gather", "reduce_scatter"), "of both layers")
    contenders: tuple[str, ...] = _names(_GEMM_CONTENDERS, "who takes part, serial among them")
    repetitions: int = _count(20, "timed calls of each")

    needs_peers = True

    def __post_init__(self) -> None:
        check_names("--operators", self.operators, ("all_gather", "reduce_scatter"), "an operator", once=False)
        check_names("--contenders", self.contenders, _GEMM_CONTENDERS, "a contender", once=False)
        if "serial" not in self.contenders:
            raise InputError("--contenders: serial is left out, but others are compared with it; add it")

    def shapes_on(self, device_type: str) -> tuple[str, ...]:
        """Return the shapes to measure on such a device."""
        return self.shapes or _GEMM_SHAPES[device_type]

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check that the ranks can share out the rows and the hidden units of every shape.

        Raises:
            InputError: naming the shape, or for one rank.
        """
        super().check_ranks(config, world_size, device_type)
        for text in self.shapes_on(device_type):
            sizes = text.split("x")
            if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
                raise InputError(f"--shapes {text}: not M x K x N; write it as 4096x12288x49152")
            if int(sizes[0]) % world_size or int(sizes[2]) % world_size:
                raise InputError(f"--shapes {text}: {world_size} ranks do not divide M and N; take multiples")
