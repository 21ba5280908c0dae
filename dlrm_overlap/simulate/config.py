"""The configuration of a simulation: frozen dataclasses, a section each, as those of a run in `dlrm_overlap.config`."""

from dataclasses import dataclass, field
from typing import Literal

from dlrm_overlap.config import (
    InputError,
    ModelConfig,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    parse_multi_hot,
)

_MOST_GPUS = 4096  # more take minutes, or the memory


@dataclass(frozen=True)
class LookupConfig:
    """How fast a kernel pools: bytes from the memory at a rate, and a time for each bag."""

    gb_per_s: PositiveFloat = 4225.0
    """of rows that are not in the cache, ids, offsets and pooled embeddings together"""
    bag_ns: NonNegativeFloat = 0.0
    """for each bag on top, over all programs: a million bags of 0.1 take 0.1 ms"""
    cached_gb_per_s: PositiveFloat | None = None
    """of all rows of a table, those in the cache included, where that takes longer; null: no row stays in the cache"""
    us: NonNegativeFloat = 0.0
    """that a lookup takes whatever its bytes"""
    few_bag_ns: NonNegativeFloat = 0.0
    """for each bag on top where a rank has fewer than 131072 of more than one id: fused then has twice as many tasks"""


@dataclass(frozen=True)
class UpdateConfig:
    """How fast rows are updated once their gradients are there."""

    gb_per_s: PositiveFloat = 4225.0
    """of all bytes of an update, as `embedding.traffic.update_bytes` counts them"""
    us: NonNegativeFloat = 0.0
    """that an update takes whatever its bytes"""
    sort_ns: NonNegativeFloat = 0.0
    """that an id takes to be sorted by row, in which nothing else has the multiprocessors: beside the head's forward
    where the backward is push, else before the update"""
    sort_us: NonNegativeFloat = 0.0
    """that a sort takes on top, however few the ids, and leaves to others: it is many small kernels"""


@dataclass(frozen=True)
class GpuConfig:
    """Rates of one GPU and of its kernels. The defaults are an H200's, as configs/simulate/h200.yaml explains."""

    memory_gb_per_s: PositiveFloat = 4225.0
    """of a copy within the memory, bytes read and written"""
    link_gb_per_s: PositiveFloat = 354.1
    """out of a GPU to its peers in the host by stores or copies, and into it"""
    collective_gb_per_s: PositiveFloat = 292.0
    """the same by the collective library"""
    collective_us: NonNegativeFloat = 29.1
    """that a collective takes on top of its bytes"""
    peer_us: NonNegativeFloat = 5.0
    """from a store to a peer until who waits for its flag goes on"""
    copy_gb_per_s: PositiveFloat = 3781.0
    """of the passes that unpack a collective's output or pack its input, bytes read and written"""
    tflop_per_s: PositiveFloat = 790.0
    """of matrix products in bf16, at best"""
    dense_efficiency: PositiveFloat = 0.6154
    """part of `tflop_per_s` that the dense part reaches, its elementwise work included"""
    kernel_us: NonNegativeFloat = 3.648
    """that each kernel of a captured step takes beside its work, where the next one waits for it"""
    pair_tflop_per_s: PositiveFloat | None = 6.46
    """of the dot interaction's products, each pair counted once; null: as of other products"""
    step_us: NonNegativeFloat = 15.2
    """that a captured step takes around its kernels: its launch, counters, the wait for the next batch's ids"""
    optimizer_gb_per_s: PositiveFloat = 4044.0
    """of the dense optimizer's 26 bytes a parameter"""
    baseline: LookupConfig = field(default_factory=lambda: LookupConfig(3442.0, 0.2919, 4090.0, 6.632))
    """FBGEMM's lookup, of the backend torchrec"""
    pgas: LookupConfig = field(default_factory=lambda: LookupConfig(4341.0, 0.06192, 6789.0, 18.98))
    """the lookup of the backend pgas"""
    fused: LookupConfig = field(default_factory=lambda: LookupConfig(4341.0, 0.08768, 4970.0, 11.3, 0.2982))
    """the lookup of the backend fused"""
    update: UpdateConfig = field(default_factory=lambda: UpdateConfig(4788.0, us=42.3, sort_ns=0.05676))
    """the update of rows of the backward push"""
    baseline_update: UpdateConfig = field(default_factory=lambda: UpdateConfig(2680.0, sort_ns=0.05678, sort_us=79.97))
    """FBGEMM's, of the backward collective"""


@dataclass(frozen=True)
class NetworkConfig:
    """Hosts, joined by NICs, one a GPU, and switches that never fill: a fat tree without oversubscription."""

    hosts: PositiveInt = 1
    """number of hosts"""
    gpus_per_host: PositiveInt = 4
    """GPUs of a host, all joined by NVLink"""
    nic_gbit_per_s: PositiveFloat = 400.0
    """of a GPU's NIC"""
    latency_ns: NonNegativeFloat = 2000.0
    """of a message to another host"""
    message_ns: NonNegativeFloat = 500.0
    """that a GPU's puts to other hosts take each, one after the other, whatever their size"""

    def __post_init__(self) -> None:
        if self.world_size > _MOST_GPUS:
            raise InputError(
                f"network: {self.hosts} hosts of {self.gpus_per_host} GPUs are {self.world_size}; the simulator takes "
                f"{_MOST_GPUS} GPUs at most"
            )

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.hosts * self.gpus_per_host


@dataclass(frozen=True)
class WorkConfig:
    """The model's tables and the batch."""

    tables: PositiveInt = 26
    """number of tables, on all ranks together"""
    tables_per_rank: PositiveInt | None = None
    """instead: tables of one rank, so that they grow with the number of ranks"""
    rows: PositiveInt | list[PositiveInt] = 1_000_000
    """rows a table"""
    max_rows: PositiveInt | None = None
    """cap on the rows of every table"""
    multi_hot: PositiveInt | str | list[PositiveInt | str] = 1
    """ids a bag: 3, or '0..8' for a uniform range"""
    zipf_alpha: NonNegativeFloat | list[NonNegativeFloat] = 0.0
    """skew of the ids, P(k-th row) ~ 1/k^alpha; 0 is uniform"""
    samples: PositiveInt = 8192
    """samples of a rank"""
    global_batch: PositiveInt | None = None
    """instead: samples of all ranks, so that a rank's share shrinks with the number of ranks"""
    dense_features: PositiveInt = 13
    """dense inputs of a sample"""
    plan: Literal["auto", "torchrec"] = "auto"
    """auto: as `embedding.plan: auto` places the tables on so many ranks, without cuts by rows; torchrec: as TorchRec's
    planner does, which also cuts tables by rows"""
    row_bytes: PositiveInt = 4
    """of an element of a row"""
    id_bytes: PositiveInt = 8
    """of an id and of an offset"""
    wire_bytes: PositiveInt = 4
    """of an element of pooled embeddings and their gradients between ranks"""
    optimizer: Literal["sgd", "rowwise_adagrad", "adagrad"] = "sgd"
    """of the rows"""

    def __post_init__(self) -> None:
        lists = [value for value in (self.rows, self.multi_hot, self.zipf_alpha) if isinstance(value, list)]
        lengths = {len(value) for value in lists}
        if lengths - {self.tables}:
            raise InputError(
                f"work: lists of {sorted(lengths)} values for {self.tables} tables; give one value a table"
            )
        if lengths and self.tables_per_rank is not None:
            raise InputError(
                "work.tables_per_rank: it takes one value for all tables; give rows, multi_hot and zipf_alpha as "
                "numbers"
            )
        for each in self.multi_hot if isinstance(self.multi_hot, list) else [self.multi_hot]:
            try:
                parse_multi_hot(each)
            except InputError as error:
                raise InputError(str(error).replace("data.tables.", "work.", 1)) from None

    def number_of_tables(self, world_size: int) -> int:
        """Return the number of tables of so many ranks."""
        return self.tables_per_rank * world_size if self.tables_per_rank is not None else self.tables


@dataclass(frozen=True)
class ExchangeConfig:
    """How pooled embeddings and their gradients travel."""

    backend: Literal["torchrec", "pgas", "fused"] = "pgas"
    """torchrec: lookup, collective, unpack, one after the other, and gradients likewise; pgas and fused: as they are
    pooled, and gradients pushed"""
    slice_bags: PositiveInt = 32
    """fused: bags a slice; a slice for another host is one put"""
    aggregate_bytes: NonNegativeInt = 0
    """puts to one host are gathered until they have so many bytes; 0 gathers none"""


@dataclass(frozen=True)
class SimulateConfig:
    """One simulation."""

    what: Literal["stage", "backward", "step"] = "step"
    """stage: lookup and exchange, forward only; backward: from the embeddings' gradient to the updated rows, the ids
    being sorted under push; step: a whole training step"""
    gpu: GpuConfig = field(default_factory=GpuConfig)
    """rates of a GPU"""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """hosts and links"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """sizes of the model; those of a run"""
    work: WorkConfig = field(default_factory=WorkConfig)
    """tables and batch"""
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    """the exchange"""

    def __post_init__(self) -> None:
        world_size = self.network.world_size
        if self.work.global_batch is not None and self.work.global_batch % world_size:
            raise InputError(
                f"work.global_batch: {self.work.global_batch} is no multiple of {world_size} ranks; give one that is"
            )
        if self.model.sequence.history is not None:
            raise InputError(
                "model.sequence.history: the simulator has no model of tables that are not pooled; leave it out"
            )
