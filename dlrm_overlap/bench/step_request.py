"""What a user can ask of the figures of the whole training step. Loads no torch."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from jsonargparse.typing import PositiveFloat, PositiveInt

from dlrm_overlap.bench.names import check_names
from dlrm_overlap.bench.request import Request, option
from dlrm_overlap.bench.step_contenders import ABLATION, STEP_CONTENDERS, USUAL, contender_config
from dlrm_overlap.config import Config, InputError


@dataclass(frozen=True)
class TrainingRequest(Request):
    """What is asked of every figure whose contenders are training runs."""

    contenders: tuple[str, ...]

    known: ClassVar[Collection[str]] = STEP_CONTENDERS
    """names that `contenders` may have"""
    references: ClassVar[Collection[str]] = ()
    """who takes part beside these"""

    def __post_init__(self) -> None:
        check_names("--contenders", self.contenders, self.known, "a contender")

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check also that every contender and reference has a configuration.

        Raises:
            InputError: naming the key, or because the ranks are on a CPU and the figure needs GPUs.
        """
        for name in (*self.references, *self.contenders):
            contender_config(config, STEP_CONTENDERS[name], device_type)
        super().check_ranks(config, world_size, device_type)


@dataclass(frozen=True)
class StepRequest(TrainingRequest):
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

    def check_ranks(self, config: Config, world_size: int, device_type: str) -> None:
        """Check also that the step's bytes can be counted.

        Raises:
            InputError: naming the key.
        """
        if config.embedding.plan == "row_wise":
            raise InputError(
                "embedding.plan: row_wise, but this figure counts the bytes of table-wise and column-wise shards; set "
                "embedding.plan auto"
            )
        super().check_ranks(config, world_size, device_type)


@dataclass(frozen=True)
class AblationRequest(TrainingRequest):
    """What is asked of the ablation of the whole step."""

    contenders: tuple[str, ...] = option(
        tuple(name for others in ABLATION.values() for name in others),
        "who takes part beside the references torchrec and pgas_graph",
        nargs="+",
    )
    steps: int = option(100, "timed steps of each contender", type=PositiveInt)
    batches: int = option(16, "different batches, read once and trained on in turn", type=PositiveInt)

    known = tuple(name for others in ABLATION.values() for name in others)
    references = ABLATION


@dataclass(frozen=True)
class TimelineRequest(TrainingRequest):
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
        super().__post_init__()
        if self.output.suffix != ".csv":
            raise InputError(
                f"--output {self.output}: must end in .csv, since the picture beside it has the same name with another "
                f"ending, and the folder of the traces without one; give one that does"
            )
