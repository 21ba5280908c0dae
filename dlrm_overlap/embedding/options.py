"""How an exchange runs, and the values that all of its parts share."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.comm.counters import Counters
from dlrm_overlap.comm.order import CommunicationOrder
from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.embedding.id_layout import IdLayout
from dlrm_overlap.embedding.internode import InternodeLayout
from dlrm_overlap.embedding.layout import FeatureShard, Layout
from dlrm_overlap.embedding.replicated import ReplicatedTables
from dlrm_overlap.embedding.steps import BatchSizes
from dlrm_overlap.embedding.tables import LocalTables

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PUTS = ("direct", "staged")


@dataclass(frozen=True)
class ExchangeOptions:
    """How an exchange runs: the keys of the configuration's section `embedding` that it needs."""

    backend: str = "pgas"
    """one of `backends.EXCHANGED`"""
    schedule: str = EmbeddingConfig.schedule
    """order of the tasks: linear | remote_first | balanced"""
    put: str = EmbeddingConfig.put
    """backends with slices, on GPUs: how a slice gets into the peer's window, one of PUTS"""
    slice_bags: int = EmbeddingConfig.slice_bags
    """backends with slices: bags in a slice"""
    programs_per_sm: int | None = None
    """backends with slices: programs that a multiprocessor runs; None takes as many as fit"""
    wire_dtype: torch.dtype = torch.float32
    """type of pooled embeddings and their gradients between ranks, and so of the windows"""
    wait_timeout_s: float = EmbeddingConfig.wait_timeout_s
    """bound of a wait for a peer"""
    backward: str | None = None
    """one of `backends.BACKWARDS` instead of the backend's own, as figures of the forward and tests take it"""
    copy_output: bool = False
    """backends that store to peers: return a copy of the pooled embeddings. Else the window itself is returned, which
    its user must let go of before the next forward"""
    output_dtype: torch.dtype = torch.float32
    """type in which pooled embeddings are returned and their gradient is taken: float32, or that of the wire; of
    unpooled tables any where the wire has float32"""
    max_gradient: float | None = None
    """the bound to which each element of the gradient of pooled embeddings is clipped, once it is divided by the number
    of ranks; None clips nothing"""
    nodes: int | Literal["auto"] = "auto"
    """backends that store to peers: auto finds out which ranks are reached by stores; a number emulates nodes, see
    `find_reach`"""
    internode: str = "messages"
    """backends that store to peers, on GPUs: how pooled rows go to other nodes, messages | puts"""
    aggregate_bytes: int = EmbeddingConfig.aggregate_bytes
    """puts: a message leaves in groups of at least so many bytes, see `kernels.grouping`"""
    leading_columns: int = 0
    """backends that store to peers: columns that each row of a lent window has in front of the pooled embeddings, for
    tensors that its user joins with them. No rank stores there, and nothing reads them"""

    def __post_init__(self) -> None:
        narrow = {self.output_dtype, self.wire_dtype} - {torch.float32}
        assert len(narrow) < 2, "two roundings"

    @property
    def resolved_backward(self) -> str:
        """The backward that is taken."""
        return self.backward or BACKENDS[self.backend].backward or ""


class StepCounters(Counters):
    """The counters of an exchange: the epochs of its windows, and its steps that had a backward.

    A run that resumes sets the latter, so that stochastic rounding does not repeat itself.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, 4)
        self.forward, self.backward, self.ids, self.steps = self.each


@dataclass(frozen=True, eq=False)
class ExchangeContext:
    """The values that an exchange and its halves share, the same in every step."""

    layout: Layout
    """the shards of all ranks"""
    tables: LocalTables
    """this rank's rows"""
    options: ExchangeOptions
    group: dist.ProcessGroup
    device: torch.device
    samples_per_rank: int
    """the most samples that a rank may bring to a step"""
    counters: StepCounters
    order: Any = field(default_factory=CommunicationOrder)
    """a `CommunicationOrder`; on a CPU, which captures no step, a context that does nothing"""
    ids: IdLayout | None = None
    """where ids are, if this exchange sends them to the owners of their rows; None leaves that to TorchRec"""
    replicated: ReplicatedTables | None = None
    """the tables that every rank holds, if this exchange looks them up; None leaves them to TorchRec"""
    reach: Reach | None = None
    """which ranks are reached by stores; None has `build_exchange` find out"""
    internode: InternodeLayout | None = None
    """the messages between nodes; None where all ranks reach each other. `build_exchange` sets it"""

    def leaves_out(self, shard: FeatureShard) -> bool:
        """Return whether a shard's empty bags are not sent, which the samples' ranks know by the ids they published.

        Where all rows have one owner nothing is added up, and its pooled embeddings are read as they are, but for empty
        slots, which are not read.
        """
        return shard.slots or (self.ids is not None and shard in self.layout.added_up)

    @property
    def largest_batch(self) -> BatchSizes:
        """The largest batch of a step: every rank brings the most samples that it may."""
        return BatchSizes.of((self.samples_per_rank,) * self.group.size())
