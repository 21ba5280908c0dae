"""Who takes part in `bench step` and `timeline`: each contender is the configuration with keys of its own.

To add one, add a line to STEP_CONTENDERS. This module loads no torch, so that an unknown name is reported at once.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from dlrm_overlap.config import Config


class StepContender(NamedTuple):
    """How a contender's run differs from the others'."""

    keys: Mapping[str, Any]
    """dotted key -> value, instead of the configuration's"""
    int32_ids: bool = False
    """whether TorchRec's lookups take ids as int32, as they are read; otherwise they cast them to int64"""


def _keys(backend: str, pipeline: str = "torchrec", compiled: bool = True, graphed: bool = True) -> dict[str, Any]:
    return {
        "embedding.backend": backend,
        "train.pipeline": pipeline,
        "train.compile_dense": compiled,
        "train.graph_dense": graphed,
    }


_TORCHREC = _keys("torchrec", compiled=False, graphed=False)  # as users run it
_GRAPH = _keys("pgas", "graph", graphed=False)  # the whole step as a CUDA graph, the dense part with it

STEP_CONTENDERS = {
    "torchrec": StepContender(_TORCHREC),
    "torchrec_strongest": StepContender(_keys("torchrec"), int32_ids=True),
    "pgas": StepContender(_keys("pgas")),
    "fused": StepContender(_keys("fused")),
    "pgas_graph": StepContender(_GRAPH),
    "fused_graph": StepContender(_keys("fused", "graph", graphed=False)),
    "torchrec_int32": StepContender(_TORCHREC, int32_ids=True),
    "pgas_eager": StepContender(_keys("pgas", compiled=False, graphed=False)),
}
_VARIANTS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "torchrec_no_balance": (_TORCHREC, {"embedding.plan": "table_wise"}),
    "torchrec_default_plan": (_TORCHREC, {"embedding.plan": "torchrec"}),
    "torchrec_row_wise": (_TORCHREC, {"embedding.plan": "row_wise"}),
    "torchrec_compiled": (_TORCHREC, {"train.compile_dense": True}),
    "torchrec_captured": (_TORCHREC, {"train.graph_dense": True}),
    "pgas_graph_stores": (_GRAPH, {"train.overlap": "stores"}),
    "pgas_graph_dma": (_GRAPH, {"train.overlap": "dma"}),
    "pgas_graph_partition": (_GRAPH, {"train.overlap": "partition"}),
    "pgas_graph_no_capture": (_GRAPH, {"train.capture": False}),
    "pgas_graph_no_compile": (_GRAPH, {"train.compile_dense": False}),
    "pgas_graph_no_flat": (_GRAPH, {"train.flat_dense": False}),
    "pgas_graph_no_balance": (_GRAPH, {"embedding.plan": "table_wise"}),
    "pgas_graph_default_plan": (_GRAPH, {"embedding.plan": "torchrec"}),
    "pgas_graph_row_wise": (_GRAPH, {"embedding.plan": "row_wise"}),
    "pgas_graph_one_part": (_GRAPH, {"embedding.gradient_parts": 1}),
    "pgas_graph_fp32_wire": (_GRAPH, {"embedding.wire_dtype": "fp32"}),
    "pgas_graph_collective": (_GRAPH, {"train.dense_reduce": "collective"}),
    "pgas_graph_tensor": (_GRAPH, {"model.top_parallel": "tensor"}),
    "pgas_graph_data_parallel": (_GRAPH, {"embedding.data_parallel_rows": 7812}),  # as in HugeCTR's record
    **{
        f"pgas_graph_2_emulated_hosts{name}": (_GRAPH, {"embedding.hosts": 2, "embedding.between_hosts": carrier})
        for name, carrier in (("", "messages"), ("_puts", "puts"))
    },
}
STEP_CONTENDERS |= {name: StepContender({**base, **keys}) for name, (base, keys) in _VARIANTS.items()}

# Those that `bench step` times where none are named.
USUAL = ("torchrec", "torchrec_strongest", "pgas", "fused", "pgas_graph", "fused_graph")


def contender_config(config: Config, contender: StepContender, device_type: str) -> Config:
    """Return `config` with the contender's keys; on a CPU without CUDA graphs of the dense part.

    A backend that does not have the backward of `config` takes its own.

    Raises:
        InputError: if the keys do not go together with the others.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key, value in contender.keys.items():
        section, name = key.split(".")
        needs_gpu = key == "train.graph_dense"
        sections.setdefault(section, {})[name] = False if needs_gpu and device_type == "cpu" else value
    made = replace(config, **{section: replace(getattr(config, section), **keys) for section, keys in sections.items()})
    return made if made.embedding.has_backward else replace(made, embedding=replace(made.embedding, backward="auto"))
