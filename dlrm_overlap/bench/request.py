"""The figures and their options, beside the configuration. Loads no torch, so that mistakes are reported at once.

A class is the options of a figure: a field made by `option` is an option on the command line, and the first line of the
docstring is the figure's summary there. To add a figure, write its file in `figures/`, with a function
`run(request, ranks)` that all ranks call and that returns the exit code, the class of its options, and a line in
FIGURES.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_type_hints

from dlrm_overlap.bench.step_contenders import GROUPS, STEP_CONTENDERS, USUAL, expand
from dlrm_overlap.config import Config, EmbeddingConfig, InputError, PositiveFloat, PositiveInt
from dlrm_overlap.launching.environment import commit

_TYPES = get_type_hints(EmbeddingConfig)


def option(default: Any, help: str, **settings: Any) -> Any:
    """Return a field that is also an option; `help` and `settings` are those of the parser's `add_argument`.

    An option takes a positive integer, or where its default is a tuple one or more; `choices` are words instead.
    """
    settings = {"nargs": "+"} | settings if isinstance(default, tuple) else settings
    settings = settings if "choices" in settings else {"type": PositiveInt} | settings
    return field(default=default, metadata={"help": help, **settings})


def check_committed(device_type: str, uncommitted: bool) -> None:
    """Check that the rows of GPUs will name the code that they measure.

    Raises:
        InputError: if files differ from the checkout's commit, and `uncommitted` does not ask for such rows.
    """
    if device_type == "cuda" and not uncommitted and (commit() or "").endswith("-dirty"):
        raise InputError(
            f"{commit()}: files differ from this commit, so nobody could measure the rows again; commit the changes, "
            f"or set --uncommitted true"
        )


@dataclass(frozen=True)
class Request:
    """The options of every figure."""

    kind: str
    """the figure's name in FIGURES"""
    output: Path
    """CSV file to append the rows to"""
    uncommitted: bool = option(False, "measure on GPUs with uncommitted changes, which rows mark as -dirty", type=bool)

    module: ClassVar[str] = ""
    """of `figures/`, whose `run` measures it; that of the figure's name where none is given"""
    needs_peers: ClassVar[bool] = False
    """whether one rank alone has nothing to measure"""
    makes_shapes: ClassVar[bool] = False
    """whether it changes the configuration's tables or batch, so that samples must be synthetic"""
    emulates_hosts: ClassVar[bool] = False
    """whether its rows name emulated hosts"""

    @classmethod
    def summary(cls) -> str:
        """Return the measurement in a line."""
        first = (cls.__doc__ or "").partition("\n")[0]
        return first[:1].lower() + first[1:].rstrip(".")

    @classmethod
    def load(cls, kind: str) -> Callable[[Any, Any], int]:
        """Import the figure's file and return its `run`, which takes the request and this rank's `Ranks`."""
        return import_module(f"dlrm_overlap.bench.figures.{cls.module or kind}").run

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
        own: dict[str, Any] = {each.name: getattr(values, each.name) for each in fields(cls) if each.metadata}
        own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
        return cls(kind, Path(values.output), **own)

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check the request against the configuration, the number of ranks and their device; needs no process group.

        Raises:
            InputError: naming the key, or because the figure needs more than one rank.
        """
        if world_size == 1 and self.needs_peers:
            raise InputError(f"bench {self.kind}: one rank has nobody to communicate with; add --nproc 2, or more")
        if self.makes_shapes and config.data.kind != "synthetic":
            raise InputError(
                f"data.kind: {config.data.kind}, but bench {self.kind} takes shapes that no file has; set "
                f"data.kind synthetic"
            )
        if not self.emulates_hosts and (hosts := config.embedding.hosts) not in ("auto", 1):
            raise InputError(
                f"embedding.hosts: {hosts} emulated hosts, but the rows of bench {self.kind} would not say so; take "
                f"bench stage, or the contender pgas_graph_2_emulated_hosts of bench step"
            )


@dataclass(frozen=True)
class InputRequest(Request):
    """The step fed by the loader, against the step on one cached batch."""

    steps: int = option(200, "timed steps of each kind")


@dataclass(frozen=True)
class JobRequest(Request):
    """A whole run of the trainer, with evaluations and saves."""


@dataclass(frozen=True)
class StepRequest(Request):
    """The whole training step under TorchRec and under our backends, or with one thing more or less."""

    contenders: tuple[str, ...] = option(
        USUAL, "who takes part; losses are compared with the first one's", choices=[*STEP_CONTENDERS, *GROUPS]
    )
    batches: int = option(16, "different batches, read once and trained on in turn")
    steps: int = option(200, "timed steps of each contender")
    dense_tflop_per_s: float = option(
        790.0, "of matrix products, for the floor; the default is cuBLAS's best on an H200, bf16", type=PositiveFloat
    )
    at_once: int = option(6, "contenders in memory together; more take turns in groups, each with the last one")
    resume: bool = option(False, "leave out contenders that --output has rows of", type=bool)

    @property
    def names(self) -> tuple[str, ...]:
        """The contenders, each group as its members."""
        return expand(self.contenders)

    def __post_init__(self) -> None:
        if self.at_once < 2:
            raise InputError(f"--at_once {self.at_once}: contenders take turns with the last one; take 2 or more")


@dataclass(frozen=True)
class ShapeRequest(Request):
    """Every figure of the embedding stage. The configuration gives the shape."""

    iterations: int = option(100, "timed steps of each contender")
    tables_per_rank: int | None = option(
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

    def shapes(self, config: Config, world_size: int) -> list[Config]:
        """Return the shapes to measure on so many ranks."""
        return [self.shape(config, world_size)]

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check also that every number of ranks to measure on has its shapes."""
        super().check_ranks(config, world_size, device_type)
        for size in self.worlds(world_size):
            self.shapes(config, size)


def with_tables(config: Config, **keys: Any) -> Config:
    """Return `config` with other keys of `data.tables`."""
    return replace(config, data=replace(config.data, tables=replace(config.data.tables, **keys)))


@dataclass(frozen=True)
class ForwardRequest(ShapeRequest):
    """Every figure of the stage's forward."""

    chunks: tuple[int, ...] = option((2, 4, 8), "of the baseline in chunks of tables; none leaves it out", nargs="*")

    module = "stage"


@dataclass(frozen=True)
class StageRequest(ForwardRequest):
    """The embedding stage's forward on one shape, all contenders; or pgas and fused by a setting of theirs."""

    schedules: tuple[str, ...] = option(
        (), "instead of other puts: orders of the tasks", nargs="*", choices=get_args(_TYPES["schedule"])
    )
    slice_bags: tuple[int, ...] = option((), "likewise slice sizes of fused", nargs="*")
    programs_per_sm: tuple[int, ...] = option((), "likewise programs of fused on a multiprocessor (GPU)", nargs="*")

    emulates_hosts = True


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
class SweepRequest(ForwardRequest):
    """Where the embedding stage gains: many shapes. An axis that is not given stays as the configuration has it.

    Bags of a pooling factor L hold 0 to 2 L ids, any number as often.
    """

    iterations: int = option(12, "timed steps of each contender on each shape")
    tables: tuple[int, ...] = option((), "tables of a rank", nargs="*")
    dims: tuple[int, ...] = option((), "of the tables", nargs="*")
    global_batches: tuple[int, ...] = option((), "samples of all ranks", nargs="*")
    pooling_factors: tuple[int, ...] = option((), "mean ids a bag, L", nargs="*")

    makes_shapes = True

    def shapes(self, config: Config, world_size: int) -> list[Config]:
        """Return the shapes of all values of the axes."""
        axes = self.tables, self.dims, self.global_batches, self.pooling_factors
        return [self._resized(config, world_size, *each) for each in itertools.product(*(a or (None,) for a in axes))]

    def _resized(
        self, config: Config, world_size: int, tables: int | None, dim: int | None, batch: int | None, ids: int | None
    ) -> Config:
        if dim:
            mlp = [*config.model.bottom_mlp[:-1], dim]
            config = replace(config, model=replace(config.model, dim=dim, bottom_mlp=mlp))
        if batch:
            config = replace(config, train=replace(config.train, global_batch_size=batch))
        if ids:
            config = with_tables(config, multi_hot=f"0..{2 * ids}")
        return replace(self, tables_per_rank=tables or self.tables_per_rank).shape(config, world_size)


_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


@dataclass(frozen=True)
class BackwardRequest(ShapeRequest):
    """The embedding stage's backward: push against the collective with FBGEMM's update."""

    optimizers: tuple[str, ...] = option(
        ("sgd", "rowwise_adagrad"), "of the rows, one after the other", choices=_OPTIMIZERS
    )


_OPERATIONS = ("all_to_all", "all_gather")
_SIZES_MB = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512), "cpu": (1, 4)}


@dataclass(frozen=True)
class CollectivesRequest(Request):
    """All-to-all and all-gather by copy engines and by stores, against NCCL's."""

    operations: tuple[str, ...] = option(_OPERATIONS[:1], "what is called", choices=_OPERATIONS)
    sizes_mb: tuple[int, ...] = option(
        (), "to each peer, of 2^20 bytes; none takes 1 to 512, or 1 4 on CPUs", nargs="*"
    )
    iterations: int = option(20, "timed calls of each contender at each size")

    needs_peers = True

    def sizes_on(self, device_type: str) -> Sequence[int]:
        """Return the sizes to measure on such a device, of 2^20 bytes to each peer."""
        return self.sizes_mb or _SIZES_MB[device_type]


_GEMM_SHAPES = {
    "cuda": (
        *("1024x12288x49152", "4096x12288x49152", "8192x12288x49152", "8192x4096x4096", "32768x4096x4096"),
        *("32768x3456x1024", "32768x1024x1024"),
    ),
    "cpu": ("64x48x96", "128x48x96"),
}
_OPERATORS = ("all_gather", "reduce_scatter")
_GEMM_CONTENDERS = ("serial", "torch", "copies", "tiles", "triggered", "auto")


@dataclass(frozen=True)
class GemmRequest(Request):
    """Products with their all-gather or reduce-scatter inside, by each way to do it."""

    shapes: tuple[str, ...] = option(
        (), "M x K x N of two layers, such as 4096x12288x49152; none takes those of wide layers, or toys", nargs="*",
        type=str,
    )  # fmt: skip
    operators: tuple[str, ...] = option(_OPERATORS, "of both layers", choices=_OPERATORS)
    contenders: tuple[str, ...] = option(
        _GEMM_CONTENDERS, "who takes part, serial among them", choices=_GEMM_CONTENDERS
    )
    repetitions: int = option(20, "timed calls of each")

    needs_peers = True

    def __post_init__(self) -> None:
        if "serial" not in self.contenders:
            raise InputError("--contenders: serial is left out, but others are compared with it; add it")

    def shapes_on(self, device_type: str) -> tuple[str, ...]:
        """Return the shapes to measure on such a device."""
        return self.shapes or _GEMM_SHAPES[device_type]

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check also that the ranks can share out the rows and the hidden units of every shape."""
        super().check_ranks(config, world_size, device_type)
        for text in self.shapes_on(device_type):
            match = re.fullmatch(r"([1-9]\d*)x[1-9]\d*x([1-9]\d*)", text)
            if not match or any(int(size) % world_size for size in match.groups()):
                raise InputError(
                    f"--shapes {text}: not M x K x N with M and N that {world_size} ranks divide; write it as "
                    f"4096x12288x49152"
                )


FIGURES: dict[str, type[Request]] = {
    "step": StepRequest,
    "stage": StageRequest,
    "weak": WeakRequest,
    "strong": StrongRequest,
    "sweep": SweepRequest,
    "backward": BackwardRequest,
    "collectives": CollectivesRequest,
    "gemm": GemmRequest,
    "input": InputRequest,
    "job": JobRequest,
}
