"""Options of the figure of products with their communication inside. Loads no torch."""

from dataclasses import dataclass

from jsonargparse.typing import PositiveInt

from dlrm_overlap.bench.request import Request, check_names, option
from dlrm_overlap.config import Config, InputError

GEMM_SHAPES = (
    "1024x12288x49152",
    "4096x12288x49152",
    "8192x12288x49152",
    "8192x4096x4096",
    "32768x4096x4096",
    "32768x3456x1024",
    "32768x1024x1024",
)
"""of wide layers, as the figure's default; on CPUs it is GEMM_TOYS"""

GEMM_TOYS = ("64x48x96", "128x48x96")

GEMM_CONTENDERS = ("serial", "torch", "copies", "pushes", "tiles", "triggered", "auto")


@dataclass(frozen=True)
class GemmRequest(Request):
    """Products with their all-gather or reduce-scatter inside, by each way to do it."""

    shapes: tuple[str, ...] = option(
        (), "M x K x N of two layers, such as 4096x12288x49152; none takes those of wide layers, or toys", nargs="+"
    )
    operators: tuple[str, ...] = option(("all_gather", "reduce_scatter"), "of both layers", nargs="+")
    contenders: tuple[str, ...] = option(GEMM_CONTENDERS, "who takes part, serial among them", nargs="+")
    repetitions: int = option(20, "timed calls of each", type=PositiveInt)

    needs_peers = True

    def __post_init__(self) -> None:
        check_names("--operators", self.operators, ("all_gather", "reduce_scatter"), "an operator", once=False)
        check_names("--contenders", self.contenders, GEMM_CONTENDERS, "a contender", once=False)
        if "serial" not in self.contenders:
            raise InputError("--contenders: serial is left out, but others are compared with it; add it")

    def shapes_on(self, device_type: str) -> tuple[str, ...]:
        """Return the shapes to measure on such a device."""
        return self.shapes or (GEMM_SHAPES if device_type == "cuda" else GEMM_TOYS)

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
