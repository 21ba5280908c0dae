"""The options of an exchange, and what all of its parts share."""

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
    """The options of an exchange; fields without a description are keys of `EmbeddingConfig`."""

    backend: str = "pgas"
    """one of `backends.EXCHANGED`"""
    schedule: str = EmbeddingConfig.schedule
    put: str = EmbeddingConfig.put
    slice_bags: int = EmbeddingConfig.slice_bags
    programs_per_sm: int | None = None
    wire_dtype: torch.dtype = torch.float32
    """dtype of pooled embeddings and their gradients between ranks, and of the windows"""
    wait_timeout_s: float = EmbeddingConfig.wait_timeout_s
    backward: str | None = None
    """one of `backends.BACKWARDS`; None for the backend's default"""
    copy_output: bool = False
    """for backends with windows: if True, the output is a copy; if False, a view of the window, to which nothing may
    refer when the next forward begins"""
    output_dtype: torch.dtype = torch.float32
    """dtype of the pooled embeddings that are returned, and of their gradient: float32 or `wire_dtype`; for unpooled
    tables any dtype if `wire_dtype` is float32"""
    max_gradient: float | None = None
    """limit of each element of the pooled embeddings' gradient after its division by the number of ranks; None clips
    nothing"""
    nodes: int | Literal["auto"] = "auto"
    internode: str = "messages"
    aggregate_bytes: int = EmbeddingConfig.aggregate_bytes
    leading_columns: int = 0
    """for backends with windows: unused columns in front of each row, for tensors that the caller would otherwise
    concatenate with the row"""

    def __post_init__(self) -> None:
        narrow = {self.output_dtype, self.wire_dtype} - {torch.float32}
        assert len(narrow) < 2, "two roundings"

    @property
    def resolved_backward(self) -> str:
        return self.backward or BACKENDS[self.backend].backward or ""


class StepCounters(Counters):
    """The epochs of the windows, and the number of steps with a backward, which seeds stochastic rounding."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, 4)
        self.forward, self.backward, self.ids, self.steps = self.each


@dataclass(frozen=True, eq=False)
class ExchangeContext:
    """What the parts of an exchange share; the same in every step."""

    layout: Layout
    tables: LocalTables
    options: ExchangeOptions
    group: dist.ProcessGroup
    device: torch.device
    samples_per_rank: int
    """largest number of samples of a rank in any step"""
    counters: StepCounters
    order: Any = field(default_factory=CommunicationOrder)
    """a `CommunicationOrder`; on a CPU, which captures no step, a null context"""
    ids: IdLayout | None = None
    """positions of ids in the windows; None if TorchRec sends the ids"""
    replicated: ReplicatedTables | None = None
    """the tables that every rank holds; None if TorchRec looks them up"""
    reach: Reach | None = None
    """which ranks this one reaches by stores; if None, `build_exchange` finds out"""
    internode: InternodeLayout | None = None
    """messages between nodes, set by `build_exchange`; None if all ranks reach each other by stores"""

    def leaves_out(self, shard: FeatureShard) -> bool:
        """Return whether the owner sends nothing for a shard's empty bags; the samples' ranks know which are empty.

        True for slots, and for partial sums if an `IdSender` sends the ids. For empty bags of other shards, zeros are
        sent.
        """
        return shard.slots or (self.ids is not None and shard in self.layout.added_up)

    @property
    def largest_batch(self) -> BatchSizes:
        return BatchSizes.of((self.samples_per_rank,) * self.group.size())
