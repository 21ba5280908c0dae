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
from dlrm_overlap.simulate.gpu_config import GpuConfig

_MOST_GPUS = 4096  # more take minutes, or the memory


@dataclass(frozen=True)
class NetworkConfig:
    """Hosts and the links between them: a fat tree with a NIC a GPU, a leaf switch a rail, and a spine."""

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
    hosts_per_leaf: PositiveInt = 32
    """hosts whose NICs of one rail are on one leaf switch"""
    oversubscription: PositiveFloat = 1.0
    """rate of a leaf's NICs over that of its ways to the spine"""

    def __post_init__(self) -> None:
        if self.oversubscription < 1:
            raise InputError(
                f"network.oversubscription: {self.oversubscription} must be 1 or more; 1 is a spine that carries all"
            )
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
    zipf_alpha: NonNegativeFloat = 0.0
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
        lengths = {len(value) for value in (self.rows, self.multi_hot) if isinstance(value, list)}
        if lengths - {self.tables}:
            raise InputError(
                f"work: lists of {sorted(lengths)} values for {self.tables} tables; give one value a table"
            )
        if lengths and self.tables_per_rank is not None:
            raise InputError(
                "work.tables_per_rank: it takes one value for all tables; give rows and multi_hot as numbers"
            )
        for each in self.multi_hot if isinstance(self.multi_hot, list) else [self.multi_hot]:
            try:
                parse_multi_hot(each)
            except InputError as error:
                raise InputError(str(error).replace("data.tables.", "work.", 1)) from None


@dataclass(frozen=True)
class ExchangeConfig:
    """How pooled embeddings and their gradients travel."""

    backend: Literal["torchrec", "pgas", "fused"] = "pgas"
    """torchrec: lookup, collective, unpack, one after the other, and gradients likewise; pgas and fused: as they are
    pooled, and gradients pushed"""
    schedule: Literal["auto", "linear", "remote_first", "balanced"] = "auto"
    """order of the destinations, as embedding.schedule"""
    slice_bags: PositiveInt = 32
    """fused: bags a slice; a slice for another host is one put"""
    aggregate_bytes: NonNegativeInt = 0
    """puts to one host are gathered until they have so many bytes; 0 gathers none"""
    aggregate_us: NonNegativeFloat = 20.0
    """a gathered put leaves no later than this after its first bytes"""
    waves: PositiveInt = 16
    """parts in which a rank's tasks are simulated; puts to other hosts leave at the end of each"""


@dataclass(frozen=True)
class ProductConfig:
    """A matrix product [m, k] x [k, n] with k divided among the ranks, so that its results are summed over them.

    The defaults but m and n describe the GPU of the simulations of T3 (Pati et al. 2024); its rates are in `gpu`.
    """

    name: str = "T-NLG"
    """of the model, for the rows"""
    m: PositiveInt = 8192
    """rows of the result: the tokens of a batch"""
    n: PositiveInt = 4256
    """columns of the result: the hidden size"""
    layer: Literal["out", "fc2", "fc1_backward", "qkv_backward"] = "fc2"
    """of a transformer, which gives k: the attention's output, n; the second layer after it, 4 n; the gradient of the
    first layer's input, 4 n; that of the input of queries, keys and values, 3 n"""
    k: PositiveInt | None = None
    """instead of `layer`: terms of each sum, on all ranks together"""
    way: Literal["serial", "software", "near_memory", "arbitrated", "ideal"] = "serial"
    """serial: product, then reduce-scatter; software: finished parts are copied by copy engines and summed by kernels
    beside the product; near_memory: finished parts are sent by triggered copies and summed by the memory; arbitrated:
    the same, with the product's memory accesses first; ideal: product and reduce-scatter side by side, as if alone"""
    gather: bool = True
    """whether an all-gather follows, so that the whole is an all-reduce"""
    element_bytes: PositiveInt = 2
    """of inputs and results"""
    programs: PositiveInt = 80
    """tiles that are computed at a time"""
    tile_m: PositiveInt = 128
    """rows of a tile of the result"""
    tile_n: PositiveInt = 128
    """columns of a tile of the result"""
    k_step: PositiveInt = 64
    """terms of the sums that a tile's program has loaded before it computes"""
    group_rows: PositiveInt = 8
    """rows of tiles that are computed column by column before the next ones"""
    cache_mb: PositiveFloat = 16.0
    """of the GPU's last cache"""
    update_factor: PositiveFloat = 2.0
    """time that the memory takes to add a byte to a byte that it holds, over that of a plain write"""
    trigger_us: NonNegativeFloat = 5.0
    """software: from the end of a part's last tile to the begin of its copy"""
    sum_share: PositiveFloat = 0.25
    """software: part of the multiprocessors that the kernel that sums holds while it runs"""
    sum_gb_per_s: PositiveFloat = 750.0
    """software: of that kernel, bytes read and written"""

    def __post_init__(self) -> None:
        if self.sum_share >= 1:
            raise InputError(f"product.sum_share: {self.sum_share} must be below 1; the rest is left to the product")

    @property
    def terms(self) -> int:
        """Number of terms of each sum, on all ranks together."""
        return self.k or self.n * {"out": 1, "fc2": 4, "fc1_backward": 4, "qkv_backward": 3}[self.layer]


@dataclass(frozen=True)
class SimulateConfig:
    """One simulation."""

    what: Literal["stage", "backward", "step", "product"] = "step"
    """stage: lookup and exchange, forward only; backward: from the embeddings' gradient to the updated rows, the ids
    being sorted under push; step: a whole training step; product: a matrix product whose results
    are summed over the ranks of one host, of which `gpu`, `network` and `product` count"""
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
    product: ProductConfig = field(default_factory=ProductConfig)
    """the matrix product"""

    def __post_init__(self) -> None:
        world_size = self.network.world_size
        if self.work.global_batch is not None and self.work.global_batch % world_size:
            raise InputError(
                f"work.global_batch: {self.work.global_batch} is no multiple of {world_size} ranks; give one that is"
            )
        if self.what == "product":
            self._check_product(world_size)

    def _check_product(self, ranks: int) -> None:
        if self.network.hosts > 1 or ranks < 2:
            raise InputError(
                f"network: {self.network.hosts} hosts of {self.network.gpus_per_host} GPUs, but a product is simulated "
                f"on one host of 2 GPUs or more; set network.hosts 1 and network.gpus_per_host"
            )
        for key, value in (("product.m", self.product.m), ("product.k", self.product.terms)):
            if value % ranks:
                raise InputError(f"{key}: {value} is no multiple of {ranks} ranks; give one that is")
