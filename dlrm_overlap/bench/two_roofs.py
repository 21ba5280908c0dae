"""How to issue a computation and a communication that do not depend on each other, by two roofs.

    preferred(Computation("gemm", flop=1.1e12, hbm_bytes=4e8), Communication("all_to_all", 256e6), 4)[0]  # dma_carved_4

Agrawal, Aga, Pati and Islam (ConCCL, ISPASS, the section on resource partitioning) choose by rooflines. So does this:
a computation takes the longer of its operations and of its bytes at a GPU's rates, a communication the bytes that leave
a rank at the links' rate. The strategies are those of `dlrm-overlap bench concurrent`, which prints how well the rule
does. Copy engines carry every communication, since no multiprocessor sends anything then. Two things are left:

- Products fill all multiprocessors, and the few programs that meet the peers and wait would start only when one of them
  ends. So products bound by their operations leave four multiprocessors to these programs.
- An all-reduce has a mean to compute between its copies, by one kernel. Where it is the longer of the two, products
  leave it 12 multiprocessors.

Pure Python: it needs neither torch nor a GPU.
"""

from typing import NamedTuple


class Computation(NamedTuple):
    """The work of a computation."""

    kind: str
    """gemm | lookup | elementwise"""
    flop: float
    """of products in bf16"""
    hbm_bytes: float
    """read and written, each operand once"""


class Communication(NamedTuple):
    """The bytes of a communication between all ranks."""

    kind: str
    """all_to_all | all_gather | all_reduce"""
    bytes: float
    """of a rank's whole buffer: sent by an all-to-all, received by an all-gather, reduced by an all-reduce"""


class Roofs(NamedTuple):
    """Rates of a GPU."""

    tflop_per_s: float = 650.0
    """of large products in bf16; the defaults are an H200's"""
    hbm_gb_per_s: float = 4200.0
    """read and written by a copy"""
    link_gb_per_s: float = 330.0
    """that leave a rank"""


_H200 = Roofs()


def preferred(
    computation: Computation, communication: Communication, world_size: int, roofs: Roofs = _H200
) -> tuple[str, ...]:
    """Return strategies of `bench concurrent` in order of preference; take the first that there is.

    Args:
        computation: its work.
        communication: its bytes.
        world_size: ranks that take part.
        roofs: rates of each rank's GPU.
    """
    operations_s = computation.flop / roofs.tflop_per_s / 1e12
    memory_s = computation.hbm_bytes / roofs.hbm_gb_per_s / 1e9
    fills_the_gpu = operations_s > memory_s
    if communication.kind == "all_reduce":
        if not fills_the_gpu:
            return "dma_averaged", "dma_aside"
        sent_bytes = 2 * communication.bytes * (world_size - 1) / world_size  # shares, then their means
        is_longer = sent_bytes / roofs.link_gb_per_s / 1e9 > operations_s
        return "dma_averaged_carved_12" if is_longer else "dma_averaged_carved_4", "dma_averaged", "dma_aside"
    return ("dma_carved_4", "dma_apart", "dma_aside") if fills_the_gpu else ("dma_apart", "dma_aside")
