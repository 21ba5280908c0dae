"""Pieces of work as CUDA graphs, so that they run as those of a captured step do."""

from collections.abc import Callable
from contextlib import suppress

import torch


def capture(piece: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Run `piece` once, capture it, and return what launches the graph; on a CPU return `piece`.

    All that the piece issues begins and ends on the current stream, which may not be the default one. It is run before
    it is captured, since a first call may load kernels and ask the other ranks. Where pieces wait for other ranks, all
    ranks call this alike.

    Raises:
        RuntimeError: if the piece cannot be captured.
    """
    if device.type != "cuda":
        return piece
    piece()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # By hand, for torch.cuda.graph collects garbage each time, which takes longer than all the rest.
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        piece()
    except BaseException:
        with suppress(RuntimeError):  # of the capture, which the error has spoilt
            graph.capture_end()
        raise
    graph.capture_end()
    return graph.replay
