"""Which ranks an exchange reaches by stores, and what carries its messages to the others."""

import logging
from functools import cached_property

import torch
import torch.distributed as dist

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.comm.network import choose_puts
from dlrm_overlap.comm.reach import Reach, find_reach
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
        puts, why = choose_puts(self._options.between_hosts, reach, self._group, device)
        if not reach.whole and reach.rank == 0:
            carrier = "NCCL" if device.type == "cuda" else "gloo"
            by = "put part by part by kernels (NVSHMEM)" if puts else f"by {carrier}, since {why}"
            log.warning(
                "backend %s: %s: stores within a host; between hosts one message a host and rank each way, %s",
                self._options.backend, reach.summary(), by,
            )  # fmt: skip
        return puts
