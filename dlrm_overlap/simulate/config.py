"""The configuration of a simulation: that of a run, and sections for the network and the GPUs."""

from dataclasses import dataclass, field
from typing import Literal

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.config import Config, InputError, NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class LookupConfig:
    """How fast a kernel pools: bytes from the memory at a rate, and a time for each bag."""

    gb_per_s: PositiveFloat = 4225.0
    """of rows that are not in the cache, ids, offsets and pooled embeddings together"""
    bag_ns: NonNegativeFloat = 0.0
    """for each bag on top, over all programs: a million bags of 0.1 take 0.1 ms"""
    cached_gb_per_s: PositiveFloat = 1e9
    """of all rows of a table, those in the cache included, where that takes longer"""
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
    tflop_per_s: PositiveFloat = 486.1
    """of the dense part in bf16: of its products, its elementwise work included"""
    kernel_us: NonNegativeFloat = 3.648
    """that each kernel of a captured step takes beside its work, where the next one waits for it"""
    pair_tflop_per_s: PositiveFloat = 6.46
    """of the dot interaction's products, each pair counted once"""
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
    update: UpdateConfig = field(default_factory=lambda: UpdateConfig(4878.0, us=42.02, sort_ns=0.05676))
    """the update of rows of the backward push"""
    baseline_update: UpdateConfig = field(default_factory=lambda: UpdateConfig(2680.0, sort_ns=0.05678, sort_us=79.97))
    """FBGEMM's, of the backward collective"""


@dataclass(frozen=True)
class NetworkConfig:
    """Hosts, joined by NICs, one a GPU, and switches that never fill: a fat tree without oversubscription."""

    hosts: PositiveInt = 1
    """number of hosts"""
    gpus_per_host: PositiveInt = 8
    """GPUs of a host, all joined by NVLink"""
    nic_gbit_per_s: PositiveFloat = 400.0
    """of a GPU's NIC"""
    latency_ns: NonNegativeFloat = 2000.0
    """of a message to another host"""
    message_ns: NonNegativeFloat = 500.0
    """that a GPU's puts to other hosts take each, one after the other, whatever their size"""

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.hosts * self.gpus_per_host


@dataclass(frozen=True)
class SimulateConfig(Config):
    """One simulation: any run whose file has the tables' rows, and what it runs on."""

    what: Literal["stage", "backward", "step"] = "step"
    """stage: lookup and exchange, forward only; backward: from the embeddings' gradient to the updated rows, the ids
    being sorted under push; step: a whole captured training step"""
    tables_per_rank: bool = False
    """data.tables are those of one rank, so that they grow with the number of ranks"""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)

    def __post_init__(self) -> None:
        if self.data.tables.rows is None:
            raise InputError("data.tables.rows: null, but a simulation reads no data; set the tables' rows")
        if self.model.sequence.history is not None:
            raise InputError("model.sequence.history: the simulator has no model of tables that are not pooled")

    @property
    def is_collective(self) -> bool:
        """Whether pooled embeddings and gradients travel by a collective; else they are stored and put."""
        return not BACKENDS[self.embedding.backend].stores_to_peers

    @property
    def update_rates(self) -> UpdateConfig:
        """How fast the exchange's backward updates rows."""
        return self.gpu.baseline_update if self.is_collective else self.gpu.update

    @property
    def id_bytes(self) -> int:
        """Bytes of an id and of an offset: a captured step's are narrow."""
        return 4 if self.what == "step" else 8

    @property
    def wire_bytes(self) -> int:
        """Bytes of an element of pooled embeddings and their gradients between ranks."""
        return 4 if self.embedding.resolved_wire_dtype(self.train.precision) == "fp32" else 2
