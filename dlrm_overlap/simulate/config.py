"""The configuration of a simulation: a run's, plus sections for the network and the GPUs."""

from dataclasses import dataclass, field
from typing import Literal

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.config import AUTO, Config, EmbeddingConfig, InputError, NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class LookupConfig:
    gb_per_s: PositiveFloat = 4225.0
    """memory bandwidth, for rows that miss the cache, ids, offsets and pooled embeddings"""
    bag_ns: NonNegativeFloat = 0.0
    """additional time per bag, over all programs: a million bags of 0.1 ns take 0.1 ms"""
    cached_gb_per_s: PositiveFloat = 1e9
    """cache bandwidth, for all rows of a table; the slower of cache and memory counts"""
    us: NonNegativeFloat = 0.0
    """fixed time of a lookup"""
    few_bag_ns: NonNegativeFloat = 0.0
    """additional time per bag where a rank has fewer than 131072 bags with more than one id each on average: fused
    then has twice as many tasks"""


@dataclass(frozen=True)
class UpdateConfig:
    gb_per_s: PositiveFloat = 4225.0
    """memory bandwidth, for all bytes of an update as `embedding.traffic.update_bytes` counts them"""
    us: NonNegativeFloat = 0.0
    """fixed time of an update"""
    sort_ns: NonNegativeFloat = 0.0
    """time per id of the sort by row, which needs all multiprocessors; it overlaps the head's forward under the
    backward push, and precedes the update otherwise"""
    sort_us: NonNegativeFloat = 0.0
    """fixed time of a sort, which is many small kernels; other work may use the multiprocessors meanwhile"""


@dataclass(frozen=True)
class GpuConfig:
    """Rates and latencies of one GPU and of this project's kernels on it.

    The defaults describe an H200; configs/simulate/h200.yaml repeats them with their origin.
    """

    link_gb_per_s: PositiveFloat = 354.1
    """bandwidth between a GPU and its peers on the node, per direction, for stores and copies"""
    collective_gb_per_s: PositiveFloat = 292.0
    """the same for the collective library"""
    collective_us: NonNegativeFloat = 29.1
    """fixed time of a collective"""
    peer_us: NonNegativeFloat = 5.0
    """latency from a store to a peer until the kernel that waits for its flag continues"""
    copy_gb_per_s: PositiveFloat = 3781.0
    """bandwidth of the passes that pack a collective's input or unpack its output, bytes read plus written"""
    tflop_per_s: PositiveFloat = 486.1
    """rate of the dense part's matrix products in bf16, including its elementwise work"""
    kernel_us: NonNegativeFloat = 3.648
    """overhead of each kernel of a captured step that the next kernel waits for"""
    pair_tflop_per_s: PositiveFloat = 6.46
    """rate of the dot interaction's products, each pair counted once"""
    step_us: NonNegativeFloat = 15.2
    """overhead of a captured step around its kernels: launch, counters, the wait for the next batch's ids"""
    optimizer_gb_per_s: PositiveFloat = 4044.0
    """bandwidth of the dense optimizer, 26 bytes per parameter"""
    baseline: LookupConfig = field(default_factory=lambda: LookupConfig(3442.0, 0.2919, 4090.0, 6.632))
    """FBGEMM's lookup (backend torchrec)"""
    pgas: LookupConfig = field(default_factory=lambda: LookupConfig(4341.0, 0.06192, 6789.0, 18.98))
    """lookup of the backend pgas"""
    fused: LookupConfig = field(default_factory=lambda: LookupConfig(4341.0, 0.08768, 4970.0, 11.3, 0.2982))
    """lookup of the backend fused"""
    update: UpdateConfig = field(default_factory=lambda: UpdateConfig(4878.0, us=42.02, sort_ns=0.05676))
    """row update of the backward push"""
    baseline_update: UpdateConfig = field(default_factory=lambda: UpdateConfig(2680.0, sort_ns=0.05678, sort_us=79.97))
    """FBGEMM's row update (backward collective)"""


@dataclass(frozen=True)
class NetworkConfig:
    """Nodes with one NIC per GPU, connected by a fat tree without oversubscription; a node is an NVLink domain."""

    nodes: PositiveInt = 1
    """number of nodes"""
    gpus_per_node: PositiveInt = 8
    """GPUs per node, all connected by NVLink: 8 in a machine with NVSwitches, 72 in a GB200 NVL72"""
    gpus_per_machine: PositiveInt | None = None
    """GPUs per machine, a divisor of gpus_per_node; null: gpus_per_node. If tables are not cut by rows over all GPUs,
    they are cut over those of a machine"""
    nic_gbit_per_s: PositiveFloat = 400.0
    """bandwidth of a GPU's NIC"""
    latency_ns: NonNegativeFloat = 2000.0
    """latency of a message to another node"""
    message_ns: NonNegativeFloat = 500.0
    """time that a GPU needs to issue one put to another node, whatever its size; puts are issued one at a time"""

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def machine_size(self) -> int:
        return self.gpus_per_machine or self.gpus_per_node


@dataclass(frozen=True)
class SimulateConfig(Config):
    """The configuration of a simulated run, which must give the tables' rows, and of the machines that it runs on."""

    embedding: EmbeddingConfig = field(default_factory=lambda: EmbeddingConfig(backend="torchrec"))
    what: Literal["stage", "backward", "step"] = "step"
    """stage: lookup and exchange, forward only; backward: from the embeddings' gradient to the updated rows (push has
    sorted the ids before); step: a whole captured training step"""
    tables_per_rank: bool = False
    """data.tables describes the tables of one rank, so their number grows with the number of ranks"""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)

    def __post_init__(self) -> None:
        if self.data.tables.rows is None:
            raise InputError("data.tables.rows: null, but a simulation reads no data; set the tables' rows")
        if self.embedding.backend == AUTO:
            raise InputError("embedding.backend: auto depends on a run's machines; simulate torchrec, pgas or fused")
        if self.model.sequence.history is not None:
            raise InputError("model.sequence.history: the simulator has no model of tables that are not pooled")
        if self.data.tables.has_wide_ids:
            raise InputError(
                f"data.tables.ids: {self.data.tables.ids}, but the simulator has no model of tables of any id or of "
                f"hashed ids; take rows"
            )
        if self.network.gpus_per_node % self.network.machine_size:
            raise InputError(
                f"network.gpus_per_machine: {self.network.gpus_per_machine} does not divide network.gpus_per_node, "
                f"{self.network.gpus_per_node}; take a divisor, or null"
            )

    def check_modelled(self) -> None:
        """Raise an `InputError` for values that would change a run's time, but do not change the simulated time."""
        memory = self.embedding.memory
        if set(memory if isinstance(memory, list) else [memory]) != {"gpu"}:
            raise InputError(
                f"embedding.memory: {memory}, but the simulator has all tables in GPU memory; take gpu and, if they do "
                f"not fit, data.tables.max_rows or more ranks"
            )
        if self.embedding.nodes != AUTO:
            raise InputError(
                f"embedding.nodes: {self.embedding.nodes} splits a run's ranks, but a simulation has the nodes of "
                f"network.nodes, {self.network.nodes}; set --network.nodes, and leave --embedding.nodes auto"
            )
        if self.what != "step":
            return
        if self.train.precision != "bf16":
            raise InputError(
                f"train.precision: {self.train.precision}, but the simulated rate of matrix products is bf16's; "
                f"take bf16, or simulate what stage or backward"
            )
        if self.model.top_parallel != "data":
            raise InputError(
                f"model.top_parallel: {self.model.top_parallel}, but the simulator has no model of layers that are "
                f"split over the ranks; take data"
            )

    @property
    def is_collective(self) -> bool:
        """Whether a collective sends pooled embeddings and gradients; otherwise kernels store and put them."""
        return not BACKENDS[self.embedding.backend].stores_to_peers

    @property
    def update_rates(self) -> UpdateConfig:
        return self.gpu.baseline_update if self.is_collective else self.gpu.update

    @property
    def id_bytes(self) -> int:
        """Bytes of an id or an offset: 4 (int32) in a captured step, else 8."""
        return 4 if self.what == "step" else 8

    @property
    def wire_bytes(self) -> int:
        """Bytes of one element of pooled embeddings, or of their gradients, as sent between ranks."""
        return 4 if self.embedding.resolved_wire_dtype(self.train.precision) == "fp32" else 2
