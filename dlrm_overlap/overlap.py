"""How what a captured step sends beside its dense part shares the GPU with it: `train.overlap`.

Three things travel while the dense part computes. Gradients of pooled embeddings go to the owners of the rows beside
the head's weights' products and the bottom MLP's backward. Dense gradients are reduced beside the rows' update. The ids
of the next batch are pulled beside the lookup and the bottom MLP; they are few, and come by a kernel in any case, which
also finds those outside their table.

`auto` asks `comm.choose`, which predicts both from sizes and from slowdowns that were measured.
"""

from typing import NamedTuple

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.comm.choose import Communication, Computation, choose, read_table
from dlrm_overlap.config import Config
from dlrm_overlap.embedding.options import WIRE_DTYPES
from dlrm_overlap.model import DLRM

_BY_KERNELS, _BY_COPIES = (
    ("stores", "stores_apart"),
    ("dma", "dma_aside", "dma_apart"),
)  # strategies of `bench concurrent`
_LEAST_COPY_BYTES = 1 << 20  # of a table's gradient: below, a copy's fixed cost of 4 to 7 us is more than its bytes'


class Overlap(NamedTuple):
    """What `train.overlap` stands for in a run."""

    backward: str
    """`embedding.backward`: the gradients' way to the owners of the rows"""
    partitioned: bool = False
    """whether the products beside the gradients leave multiprocessors to them"""
    reason: str = ""
    """why, for the log"""


def resolve_overlap(config: Config, dlrm: DLRM, samples: int, world_size: int, device_type: str) -> Overlap:
    """Return what the run takes; keys that name a way themselves keep it.

    Args:
        dlrm: the model, of whose products the sizes are taken.
        samples: of a rank, b.
        world_size: ranks of the run, W.
        device_type: cpu or cuda.
    """
    backward, name, reason = config.embedding.backward, config.train.overlap, ""
    takes_dma = "dma" in BACKENDS[config.embedding.backend].backwards
    if name == "auto":
        captured = device_type == "cuda" and config.train.pipeline != "torchrec" and config.train.capture
        if not (captured and takes_dma and world_size > 1):
            return Overlap(backward)
        name, reason = _choose(config, dlrm, samples, world_size)
    if backward == "auto" and takes_dma:
        backward = "dma" if name == "dma" else "push"
    return Overlap(backward, name == "partition", reason)


def _choose(config: Config, dlrm: DLRM, samples: int, world_size: int) -> tuple[str, str]:
    """Return stores or dma, and why."""
    columns = config.model.dim * len(dlrm.keys)
    wire = WIRE_DTYPES[config.embedding.resolved_wire_dtype(config.train.precision)].itemsize
    if (copied := samples * config.model.dim * wire) < _LEAST_COPY_BYTES:
        return "stores", f"a table's gradient has {copied} bytes, too few for a copy"
    computation, communication = beside(dlrm, samples), Communication("all_to_all", samples * columns * wire)
    choice = choose(computation, communication, world_size, read_table(), {*_BY_KERNELS, *_BY_COPIES})
    sizes = f"{communication.bytes / 1e6:.0f} MB beside products of {computation.flop / 1e9:.0f} GFLOP"
    name = "dma" if choice.strategy in _BY_COPIES else "stores"
    return name, f"{sizes} are predicted to take {choice.together_ms:.3f} ms so"


def beside(dlrm: DLRM, samples: int) -> Computation:
    """Return the products beside which gradients travel: the head's weights' gradients, the bottom MLP's backward.

    Example: 100 samples, a head of one weight [1, 8] and a bottom MLP of one [8, 4]: 2 * 100 * 8 operations, and twice
    2 * 100 * 32, three products.
    """
    head, bottom = ([tuple(p.shape) for p in part.parameters() if p.dim() == 2] for part in (dlrm.head, dlrm.bottom))
    products = [*head, *bottom, *bottom]
    flop = sum(2.0 * samples * rows * columns for rows, columns in products)
    hbm_bytes = sum(2.0 * (samples * (rows + columns) + rows * columns) for rows, columns in products)
    return Computation("gemm", flop, hbm_bytes, len(products))
