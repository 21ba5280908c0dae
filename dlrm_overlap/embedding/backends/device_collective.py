"""`nccl` on GPUs: the zero-copy kernel stores into the send buffer of the collective."""

import torch

from dlrm_overlap.embedding.backends.collective import CollectiveForward
from dlrm_overlap.embedding.device.lookup import DeviceLookup
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.protocol.step import Step
from dlrm_overlap.embedding.protocol.windows import WindowPair


class DeviceCollectiveForward(CollectiveForward):
    """`CollectiveForward` with the lookup of `pgas`."""

    def __init__(self, context: ExchangeContext, windows: WindowPair | None) -> None:
        super().__init__(context, windows)
        self.lookup = DeviceLookup(context, self.columns, self.bad_ids)

    def pool(self, step: Step, send: torch.Tensor) -> None:
        """Pool by one kernel for each kind of shards."""
        self.lookup.store(self.lookup.destinations_in(send, step), step, self.lookup.tables())

    def check(self) -> None:
        """Raise what a kernel has recorded, see `DeviceLookup.check`."""
        self.lookup.check()
