"""What runs at the same time as the exchange of gradients and the update of rows, by a trace of the GPU."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.observe.trace_summary import GpuWork, Span, gpu_work, length, read_events
from tests.gpu.exchange.place import Place, every
from tests.gpu.exchange.stage_by_hand import Batch, Stage, Table

_SAMPLES = 16384  # a rank
_LEAD_CYCLES = 50_000_000  # some 30 ms
_LEAST_OVERLAP = 0.3
_LAUNCH_US = 20.0  # between two kernels of two streams
_LONGEST_WAIT = 0.5  # of the all-reduce, as a share of the rest of the update when the dense part's backward ends


def _trace(place: Place, tables: Sequence[Table], widths: Sequence[int]) -> list[GpuWork]:
    """Trace a step of tables and of a bottom MLP of `widths` under DDP.

    All of its backward is issued before it runs, on all ranks at the same time.
    """
    stage = Stage(place, tables, lr=0.1)
    stage.fill(integers=False)
    batch = Batch(place, tables, [_SAMPLES] * place.world_size, seed=0)
    exchange, inputs = stage.exchange(ExchangeOptions(wait_timeout_s=20.0)), stage.inputs(batch)
    layers = [nn.Linear(*pair, device=place.device) for pair in pairwise(widths)]
    bottom_mlp = DistributedDataParallel(nn.Sequential(*layers), process_group=place.group)
    top_mlp = nn.Linear(stage.columns[-1], 512, device=place.device)
    dense = torch.randn(_SAMPLES, widths[0], device=place.device)
    together = torch.zeros(1, device=place.device)

    def step() -> None:
        awaitable = exchange.start(inputs, batch.sizes)
        bottom = bottom_mlp(dense)
        loss = top_mlp(awaitable.wait()).mean() + bottom.mean()
        torch.cuda._sleep(_LEAD_CYCLES)  # until all is issued: a slow host would separate them
        dist.all_reduce(together, group=place.group)
        loss.backward()

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        place.meet()
        step()
        place.synchronize()
    path = place.folder / f"{place.name}_trace_{place.rank}.json"
    profiler.export_chrome_trace(str(path))
    place.close(exchange)
    return gpu_work(read_events(path))


def _spans(work: Sequence[GpuWork], name: str) -> list[Span]:
    found = [each.span for each in work if name in each.name]
    assert found, f"no kernel {name} among {sorted({each.name for each in work})}"
    return found


def _dense(work: Sequence[GpuWork], begin: float) -> list[Span]:
    """Return what the main stream runs from `begin` on."""
    (main,) = {each.stream for each in work if "_store_pooled" in each.name}
    on_main = [each.span for each in work if each.stream == main and each.kind != "copies"]
    return [Span(max(span.begin, begin), span.end) for span in on_main if span.end > begin]


def _check_overlaps(place: Place) -> None:
    """The bottom MLP's backward runs while gradients are sent and rows are updated."""
    tables = [Table(20_000, 128, owner, longest=2) for _ in range(8) for owner in range(place.world_size)]
    work = _trace(place, tables, (1024, 2048, 2048, 2048))
    exchange = Span(min(_spans(work, "_push_gradients")).begin, max(span.end for span in _spans(work, "_update_rows")))
    dense = _dense(work, exchange.begin)
    dense_us, exchange_us = length(dense), length([exchange])
    overlap_us = dense_us + exchange_us - length([*dense, exchange])
    message = f"{overlap_us:.0f} us of {dense_us:.0f} us of dense kernels within {exchange_us:.0f} us of the exchange"
    assert overlap_us >= _LEAST_OVERLAP * min(dense_us, exchange_us) > 0, message


def _check_yields(place: Place) -> None:
    """The bottom MLP's backward and its all-reduce are short and issued later, and do not wait for a long update."""
    longest = 2048 // place.world_size  # so that owners update equally long, whatever their number is
    tables = [Table(200_000, 128, owner, longest=longest) for owner in range(place.world_size)]
    work = _trace(place, tables, (256, 256, 256))
    updates = _spans(work, "_update_rows")
    begin, end = min(updates).begin, max(span.end for span in updates)
    dense_end = max((span.end for span in _dense(work, begin)), default=begin)
    assert dense_end < end, f"the dense part ends {dense_end - end:.0f} us after an update of {end - begin:.0f} us"
    wait = max(_spans(work, "AllReduce")).begin - dense_end
    message = f"the all-reduce waits {wait:.0f} us, where {end - dense_end:.0f} us of an update are left"
    assert wait <= max(_LONGEST_WAIT * (end - dense_end), _LAUNCH_US), message


CHECKS = every("update_overlaps", _check_overlaps, gpu_only=True) | every("update_yields", _check_yields, gpu_only=True)
