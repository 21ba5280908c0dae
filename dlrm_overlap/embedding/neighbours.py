"""Which ranks an exchange reaches by stores, and what carries its messages to the others."""

import logging
from functools import cached_property

import torch
import torch.distributed as dist

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.comm.network import agree_on_puts
from dlrm_overlap.comm.order import uncompiled
from dlrm_overlap.comm.reach import Reach, find_reach
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.options import ExchangeOptions

log = logging.getLogger("dlrm_overlap")


class Neighbours:
    """The hosts of a group's ranks, as the options of an exchange see them. All ranks ask alike."""

    def __init__(self, options: ExchangeOptions, group: dist.ProcessGroup, device: torch.device) -> None:
        self._options, self._group, self._device = options, group, device

    @cached_property
    def reach(self) -> Reach:
        """Which ranks this one reaches by stores; a collective when it is asked for first."""
        if BACKENDS[self._options.backend].stores_to_peers:
            return find_reach(self._group, self._device, self._options.hosts)
        return Reach.of_one_host(self._group)  # a collective reaches all alike, and needs no look

    @cached_property
    def puts(self) -> bool:
        """Whether kernels put messages to other hosts; a collective when it is asked for first.

        Where there are several hosts, rank 0's log says so, and how they are reached.
        """
        reach, device = self.reach, self._device
        puts, why = agree_on_puts(self._options.between_hosts, reach, self._group, device, self._options.wait_timeout_s)
        if not reach.whole and reach.rank == 0:
            carrier = "NCCL" if device.type == "cuda" else "gloo"
            by = "put part by part by kernels (NVSHMEM)" if puts else f"by {carrier}, since {why}"
            log.warning(
                "backend %s: %s: stores within a host; between hosts one message a host and rank each way, %s",
                self._options.backend, reach.summary(), by,
            )  # fmt: skip
        return puts

    @uncompiled
    def require_as_many(self, samples: int) -> None:
        """Raise, on every rank, if ranks bring different numbers of samples; a collective.

        Ids that ranks publish are found by the number of samples, which each takes its own for everybody's. Training
        steps have as many as their bound says. Of a batch to evaluate nobody knows but by asking.

        Raises:
            InputError: if ranks differ; nothing has begun.
        """
        mine = torch.tensor([samples], dtype=torch.int64, device=self._host_or_device)
        every = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(every, mine, group=self._group)
        sizes = torch.cat(every).tolist()
        if (other := next((rank for rank, size in enumerate(sizes) if size != samples), None)) is not None:
            raise InputError(
                f"evaluation: {samples} samples on rank {self._group.rank()} and {sizes[other]} on rank {other}, but "
                f"where ids are sent without the host all ranks have as many; leave out or pad the last samples"
            )

    @cached_property
    def _host_or_device(self) -> torch.device:
        """Where the group gathers numbers: on the host, which need not wait for the GPU, if it has a way to do so."""
        try:
            self._group._get_backend(torch.device("cpu"))
        except RuntimeError:
            return self._device
        return torch.device("cpu")
