"""What a user can ask of each figure, beside the configuration. Loads no torch: mistakes are reported at once.

A class is what a figure takes; a field made by `option` is an option on the command line. Here are what all have in
common and the figures that no family below has: `stage_request`, `sweep_request`, `step_request`, `gemm_request`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from jsonargparse.typing import PositiveInt

from dlrm_overlap.bench.concurrent_strategies import check_left_out
from dlrm_overlap.bench.names import check_names
from dlrm_overlap.config import Config, InputError


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
        check_names("--contenders", self.contenders, COLLECTIVE_CONTENDERS, "a contender")
        check_names("--operations", self.operations, ("all_to_all", "all_gather"), "an operation", once=False)
        check_names("--beside", self.beside, ("nothing", "compute"), "known", once=False)

    def sizes_on(self, device_type: str) -> tuple[int, ...]:
        """Return the sizes to measure on such a device, of 2^20 bytes to each peer."""
        return self.sizes_mb or (COLLECTIVE_SIZES_MB if device_type == "cuda" else COLLECTIVE_TOYS_MB)


@dataclass(frozen=True)
class ConcurrentRequest(Request):
    """What is asked of the figure of a computation beside a communication. The configuration plays no part."""

    repetitions: int = option(15, "timed runs of each strategy in each case", type=PositiveInt)
    without: tuple[str, ...] = option((), "strategies that are left out", nargs="*")
    captured: bool = option(
        False, "time pieces of work that are captured in CUDA graphs, as a step is (GPU)", action="store_true"
    )
    most_seconds: int | None = option(
        None, "end behind the communication at which so many have passed; small ones come first", type=PositiveInt
    )

    needs_peers = True

    def __post_init__(self) -> None:
        check_left_out(self.without)
