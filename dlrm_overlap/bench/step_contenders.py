"""Who takes part in `bench step` and `timeline`: each contender is the configuration with keys of its own.

To add one, add a line to STEP_CONTENDERS. This module loads no torch, so that an unknown name is reported at once.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from dlrm_overlap.config import Config

_GPU_ONLY = ("train.graph_dense",)


class StepContender(NamedTuple):
    """How a contender's run differs from the others'."""

    keys: Mapping[str, Any]
    """dotted key -> value, instead of the configuration's"""
    int32_ids: bool = False
    """whether TorchRec's lookups take ids as int32, as they are read; otherwise they cast them to int64"""


def _contender(
    backend: str,
    pipeline: str = "torchrec",
    *,
    compiled: bool = True,
    graphed: bool = True,
    int32_ids: bool = False,
    **others: Any,
) -> StepContender:
    """Return a contender with these keys and `others`, whose dots are written as two underscores."""
    keys = {
        "embedding.backend": backend,
        "train.pipeline": pipeline,
        "train.compile_dense": compiled,
        "train.graph_dense": graphed,
    }
    return StepContender(keys | {name.replace("__", "."): value for name, value in others.items()}, int32_ids)


def _torchrec(*, compiled: bool = False, graphed: bool = False, **others: Any) -> StepContender:
    """Return TorchRec as users run it, or with something more."""
    return _contender("torchrec", compiled=compiled, graphed=graphed, **others)


def _pgas_graph(**others: Any) -> StepContender:
    """Return the whole step as a CUDA graph, the dense part with it."""
    return _contender("pgas", "graph", graphed=False, **others)


STEP_CONTENDERS = {
    "torchrec": _torchrec(),  # as users run it
    "torchrec_strongest": _contender("torchrec", int32_ids=True),
    "pgas": _contender("pgas"),
    "fused": _contender("fused"),
    "pgas_graph": _pgas_graph(),
    "pgas_graph_stores": _pgas_graph(train__overlap="stores"),
    "pgas_graph_dma": _pgas_graph(train__overlap="dma"),
    "pgas_graph_partition": _pgas_graph(train__overlap="partition"),
    "fused_graph": _contender("fused", "graph", graphed=False),
    "torchrec_no_balance": _torchrec(embedding__plan="table_wise"),
    "torchrec_row_wise": _torchrec(embedding__plan="row_wise"),
    "torchrec_int32": _torchrec(int32_ids=True),
    "torchrec_compiled": _torchrec(compiled=True),
    "torchrec_captured": _torchrec(graphed=True),
    "pgas_eager": _contender("pgas", compiled=False, graphed=False),
    "pgas_graph_no_capture": _pgas_graph(train__capture=False),
    "pgas_graph_no_compile": _pgas_graph(compiled=False),
    "pgas_graph_no_flat": _pgas_graph(train__flat_dense=False),
    "pgas_graph_no_balance": _pgas_graph(embedding__plan="table_wise"),
    "pgas_graph_row_wise": _pgas_graph(embedding__plan="row_wise"),
    "pgas_graph_one_part": _pgas_graph(embedding__gradient_parts=1),
    "pgas_graph_fp32_wire": _pgas_graph(embedding__wire_dtype="fp32"),
    "pgas_graph_collective": _pgas_graph(train__dense_reduce="collective"),
    "pgas_graph_tensor": _pgas_graph(model__top_parallel="tensor"),
    "pgas_graph_data_parallel": _pgas_graph(embedding__data_parallel_rows=7812),  # as in HugeCTR's record
    "pgas_graph_2_emulated_hosts": _pgas_graph(embedding__hosts=2, embedding__between_hosts="messages"),
    "pgas_graph_2_emulated_hosts_puts": _pgas_graph(embedding__hosts=2, embedding__between_hosts="puts"),
}

# Those that `bench step` times where none are named.
USUAL = ("torchrec", "torchrec_strongest", "pgas", "fused", "pgas_graph", "fused_graph")


def contender_config(config: Config, contender: StepContender, device_type: str) -> Config:
    """Return `config` with the contender's keys; on a CPU without those that only a GPU takes.

    A backend that does not have the backward of `config` takes its own.

    Raises:
        InputError: if the keys do not go together with the others.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key, value in contender.keys.items():
        section, name = key.split(".")
        default = getattr(type(getattr(config, section)), name)
        sections.setdefault(section, {})[name] = default if device_type == "cpu" and key in _GPU_ONLY else value
    changed = {section: replace(getattr(config, section), **keys) for section, keys in sections.items()}
    made = replace(config, **changed)
    return made if made.embedding.has_backward else replace(made, embedding=replace(made.embedding, backward="auto"))
