"""The section `gpu` of a simulation: rates of one GPU and of its kernels."""

from dataclasses import dataclass, field

from dlrm_overlap.config import NonNegativeFloat, NonNegativeInt, PositiveFloat


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

    sgd_gb_per_s: PositiveFloat = 4225.0
    """of rows, places and gradients, each gradient read once, under sgd"""
    adagrad_gb_per_s: PositiveFloat = 4225.0
    """the same under rowwise_adagrad and adagrad"""
    repeated_gb_per_s: PositiveFloat = 4225.0
    """of gradients that are read again, for further ids of a bag"""
    us: NonNegativeFloat = 0.0
    """that an update takes whatever its bytes"""
    gradients_gb_per_s: PositiveFloat | None = None
    """of gradients that are read for the first time; null: as those of rows"""
    exchanged_gb_per_s: PositiveFloat | None = None
    """of gradients that are read to be sent, and written where they arrive; null: as those of rows"""
    sort_ns: NonNegativeFloat = 0.0
    """that an id takes to be sorted by row, in which nothing else has the multiprocessors: beside the head's forward
    where the backward is push, else before the update; 0 where the rates above are those of an update with its sort"""
    sort_us: NonNegativeFloat = 0.0
    """that a sort takes on top, however few the ids, and leaves to others: it is many small kernels"""


@dataclass(frozen=True)
class KernelsConfig:
    """How many kernels of the dense part wait for one another, as compiled and captured; a cross layer is a layer."""

    forward: NonNegativeInt = 2
    """of a layer, or of the dot products, in the forward: product, activation"""
    backward: NonNegativeInt = 5
    """likewise in the backward: two products, two that sum the bias' gradient, the activation's"""
    loss: NonNegativeInt = 9
    """of the loss, of casts, and of all else that the forward has once"""


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
    dense_efficiency: PositiveFloat = 0.6157
    """part of `tflop_per_s` that the dense part reaches, its elementwise work included"""
    kernel_us: NonNegativeFloat = 3.66
    """that each kernel of a captured step takes beside its work, where the next one waits for it"""
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    """of the dense part"""
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
    update: UpdateConfig = field(
        default_factory=lambda: UpdateConfig(4238.0, 4238.0, 4238.0, us=43.67, sort_ns=0.05676)
    )
    """the update of rows of the backward push"""
    baseline_update: UpdateConfig = field(
        default_factory=lambda: UpdateConfig(2680.0, 2680.0, 2680.0, sort_ns=0.05678, sort_us=79.97)
    )
    """FBGEMM's, of the backward collective"""
