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
    """of the communication, of `implementations.Implementations`; None: the one that is fastest alone"""
    communication_first: bool = True
    """whether the communication is issued before the computation"""
    concurrent: bool = True
    urgent: bool = False
    """whether the communication's stream has a high priority, the computation's a low one"""
    share: int | None = None
    """multiprocessors that are left to the communication, or thread blocks that it is given"""
    partitioned: bool = False
    """whether these multiprocessors are the communication's own, by two green contexts"""
    carved: bool = False
    """whether cuBLAS cuts products for the other multiprocessors, which binds neither side"""
    aside: bool = False
    """whether a communication that has streams of its own meets its peers on yet another, not the computation's"""
    apart: bool = False
    """whether it also awaits their data there, so that the computation's stream only joins it in the end"""

    @property
    def label(self) -> str:
        """Name it with its share."""
        return self.name if self.share is None else f"{self.name}_{self.share}"


def all_strategies() -> list[Strategy]:
    """Return those of a GPU with everything."""
    return [
        Strategy("serial", None, concurrent=False),
        Strategy("plain", "collective", communication_first=False),
        Strategy("communication_first", "collective"),
        Strategy("priority", "collective", urgent=True),
        *(Strategy("limited", f"collective_{share}", urgent=True, share=share) for share in SHARES),
        *(Strategy("partition", f"collective_{share}", share=share, partitioned=True) for share in SHARES),
        *(Strategy("carved", f"collective_{share}", urgent=True, share=share, carved=True) for share in SHARES),
        Strategy("stores", "stores", urgent=True),
        Strategy("stores_apart", "stores", urgent=True, aside=True, apart=True),
        Strategy("dma", "dma", urgent=True),
        Strategy("dma_aside", "dma", urgent=True, aside=True),
        Strategy("dma_apart", "dma", urgent=True, aside=True, apart=True),
        Strategy("dma_averaged", "dma_averaged", urgent=True, aside=True, apart=True),
        Strategy("dma_gathered", "dma_gathered", urgent=True, aside=True, apart=True),
        *(
            Strategy(f"{name}_carved", name, urgent=True, aside=True, apart=True, share=share, carved=True)
            for name, shares in (("stores", SHARES[1:2]), ("dma", COPY_SHARES), ("dma_averaged", COPY_SHARES))
            for share in shares
        ),
        *(Strategy("dma_partition", "dma", share=share, partitioned=True) for share in COPY_SHARES),
    ]
