"""The strategies of `bench concurrent`: ways to issue a computation and a communication so that both end early.

Agrawal, Aga, Pati and Islam (ConCCL, ISPASS) name most of them: `plain` concurrency, prioritisation by the order of
issue or by streams, partitions of the multiprocessors, and copies by DMA engines. Loads no torch.
"""

from dataclasses import dataclass

SHARES = (12, 20, 28)
"""multiprocessors that a communication is left with, and thread blocks (CTAs) that NCCL is limited to"""


COPY_SHARES = (4, 12)
"""the same, where copy engines carry the bytes, and only meeting the peers, waiting and adding up are left"""


@dataclass(frozen=True)
class Strategy:
    """One way to issue both."""

    name: str
    implementation: str | None
    """of the communication, of `communications.make_communications`; None: the one that is fastest alone"""
    concurrent: bool = True
    first: bool = True
    """whether the communication is issued before the computation"""
    urgent: bool = False
    """whether the communication's stream has a high priority, the computation's a low one"""
    share: int | None = None
    """multiprocessors that are left to the communication, or thread blocks that it is given"""
    partitioned: bool = False
    """whether these multiprocessors are the communication's own, by two green contexts"""
    carved: bool = False
    """whether cuBLAS cuts products for the other multiprocessors, which binds neither side"""

    @property
    def label(self) -> str:
        """Name it with its share."""
        return self.name if self.share is None else f"{self.name}_{self.share}"


def all_strategies() -> list[Strategy]:
    """Return those of a GPU with everything."""
    return [
        Strategy("serial", None, concurrent=False, first=False),
        Strategy("plain", "collective", first=False),
        Strategy("priority", "collective", urgent=True),
        *(Strategy("limited", f"collective_{share}", urgent=True, share=share) for share in SHARES),
        *(Strategy("partition", f"collective_{share}", share=share, partitioned=True) for share in SHARES),
        *(Strategy("carved", f"collective_{share}", urgent=True, share=share, carved=True) for share in SHARES),
        Strategy("stores_apart", "stores", urgent=True),
        Strategy("stores_carved", "stores", urgent=True, share=SHARES[1], carved=True),
        Strategy("dma_apart", "dma", urgent=True),
        *(Strategy("dma_carved", "dma", urgent=True, share=share, carved=True) for share in COPY_SHARES),
        *(Strategy("dma_partition", "dma", share=share, partitioned=True) for share in COPY_SHARES),
        Strategy("dma_averaged", "dma_averaged", urgent=True),
        *(Strategy("dma_averaged_carved", "dma_averaged", urgent=True, share=n, carved=True) for n in COPY_SHARES),
    ]
