"""Who takes part in `bench step`: each contender is the configuration with a few keys of its own.

To add one, an ablation for instance, add a line to STEP_CONTENDERS. This module loads no torch, so that an unknown
name is reported at once.
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
    """whether TorchRec's lookups are told to take ids as int32, as they are read; otherwise they cast them to int64"""


def _contender(
    backend: str,
    pipeline: str = "torchrec",
    *,
    compiled: bool = True,
    graphed: bool = True,
    int32_ids: bool = False,
    **others: Any,
) -> StepContender:
    keys = {
        "embedding.backend": backend,
        "train.pipeline": pipeline,
        "train.compile_dense": compiled,
        "train.graph_dense": graphed,
        **{f"embedding.{key}": value for key, value in others.items()},
    }
    return StepContender(keys, int32_ids)


STEP_CONTENDERS = {
    "torchrec": _contender("torchrec", compiled=False, graphed=False),  # as users run it
    "torchrec_strongest": _contender("torchrec", int32_ids=True),
    "pgas": _contender("pgas"),
    "fused": _contender("fused"),
    "pgas_graph": _contender("pgas", "graph", graphed=False),  # the dense part is in the graph of the whole step
    "fused_graph": _contender("fused", "graph", graphed=False),
    "pgas_graph_data_parallel": _contender(
        "pgas", "graph", graphed=False, data_parallel_rows=7812
    ),  # as HugeCTR's plan
}


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
