"""Who takes part in `bench step`: each contender is the configuration with a few keys of its own.

To add one, an ablation for instance, add a line to `list_contenders`. This module loads no torch, so that an unknown
name is reported at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args, get_type_hints

from dlrm_overlap.config import Config, TrainConfig

_GPU_ONLY = ("train.graph_dense",)


class StepContender(NamedTuple):
    """How a contender's run differs from the others'."""

    keys: Mapping[str, Any]
    """dotted key -> value, instead of the configuration's"""
    int32_ids: bool = False
    """whether TorchRec's lookups are told to take ids as int32, as they are read; otherwise they cast them to int64"""


def _contender(
    backend: str, pipeline: str, *, compiled: bool = True, graphed: bool = True, int32_ids: bool = False
) -> StepContender:
    keys = {
        "embedding.backend": backend,
        "train.pipeline": pipeline,
        "train.compile_dense": compiled,
        "train.graph_dense": graphed,
    }
    return StepContender(keys, int32_ids)


def list_contenders(pipelines: Sequence[str]) -> dict[str, StepContender]:
    """Return name -> contender, where `train.pipeline` may be one of `pipelines`."""
    torchrecs = "torchrec" if "torchrec" in pipelines else "sparse_dist"  # the value that names TorchRec's own
    contenders = {
        "torchrec": _contender("torchrec", torchrecs, compiled=False, graphed=False),  # as users run it
        "torchrec_strongest": _contender("torchrec", torchrecs, int32_ids=True),
        "pgas": _contender("pgas", torchrecs),
        "fused": _contender("fused", torchrecs),
        "pgas_graph": _contender("pgas", "graph", graphed=False),  # the dense part is in the graph of the whole step
        "fused_graph": _contender("fused", "graph", graphed=False),
    }
    return {name: each for name, each in contenders.items() if each.keys["train.pipeline"] in pipelines}


STEP_CONTENDERS = list_contenders(get_args(get_type_hints(TrainConfig)["pipeline"]))


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
