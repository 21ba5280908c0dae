"""Who takes part in `bench step`: each contender is the configuration with keys of its own.

To add one, add a line to a table here. This module loads no torch, so that an unknown name is reported at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dlrm_overlap.config import Config


class StepContender(NamedTuple):
    """How a contender's run differs from the others'."""

    keys: Mapping[str, Any]
    """dotted key -> value, instead of the configuration's"""
    extras: frozenset[str] = frozenset()
    """what no key gives: int32_ids of FBGEMM's lookups; TorchRec's fused_pipeline, which looks up beside the optimizer,
    and its index_dedup of tables that are not pooled; drop_in, our sharders at their defaults"""


def _keys(backend: str, pipeline: str = "torchrec", compiled: bool = True, graphed: bool = True) -> dict[str, Any]:
    return {
        "embedding.backend": backend,
        "train.pipeline": pipeline,
        "train.compile_dense": compiled,
        "train.graph_dense": graphed,
    }


_TORCHREC = _keys("torchrec", compiled=False, graphed=False)  # as users run it
_GRAPH = _keys("pgas", "graph", graphed=False)  # the whole step as a CUDA graph, the dense part with it
_WHOLE, _DEFAULT = {"embedding.plan": "table_wise"}, {"embedding.plan": "torchrec"}
_BF16 = {"embedding.wire_dtype": "bf16"}

# What TorchRec is at its strongest with depends on the model and the machine: the fastest of these.
_STRONGEST: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "": ({}, ""),
    "_table_wise": (_WHOLE, ""),
    "_captured": ({"train.compile_dense": False}, ""),
    "_compiled": ({"train.graph_dense": False}, ""),
    "_bf16": (_BF16, ""),
    "_bf16_table_wise": (_BF16 | _WHOLE, ""),
    "_fp16": ({"embedding.wire_dtype": "fp16"}, ""),
    "_default_plan": (_DEFAULT, ""),
    "_fused_pipeline": ({}, "fused_pipeline"),
}
# Those of a model with tables that are not pooled.
_STRONGEST_UNPOOLED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "_index_dedup": ({}, "index_dedup"),
    "_bf16_index_dedup": (_BF16, "index_dedup"),
}
_ABLATION: Mapping[str, Mapping[str, Any]] = {
    "no_capture": {"train.capture": False},
    "no_compile": {"train.compile_dense": False},
    "no_flat": {"train.flat_dense": False},
    "fp32_wire": {"embedding.wire_dtype": "fp32"},
    "collective": {"train.dense_reduce": "collective"},
    "no_balance": _WHOLE,
}
_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "default_plan": _DEFAULT,
    "tensor": {"model.top_parallel": "tensor"},
    "2_emulated_hosts": {"embedding.hosts": 2, "embedding.between_hosts": "messages"},
    "2_emulated_hosts_puts": {"embedding.hosts": 2, "embedding.between_hosts": "puts"},
}

STEP_CONTENDERS = {
    "torchrec": StepContender(_TORCHREC),
    **{
        f"torchrec_strongest{name}": StepContender(_keys("torchrec") | keys, frozenset({"int32_ids", extra} - {""}))
        for name, (keys, extra) in (_STRONGEST | _STRONGEST_UNPOOLED).items()
    },
    "drop_in": StepContender(
        _keys("pgas", compiled=False, graphed=False) | {"embedding.wire_dtype": "fp32"}, frozenset({"drop_in"})
    ),
    "drop_in_graph": StepContender(
        _GRAPH | {"train.compile_dense": False, "train.flat_dense": False, "embedding.wire_dtype": "fp32"},
        frozenset({"drop_in"}),
    ),
    "pgas": StepContender(_keys("pgas")),
    "fused": StepContender(_keys("fused")),
    "fused_graph": StepContender(_keys("fused", "graph", graphed=False)),
    "pgas_graph": StepContender(_GRAPH),
    **{f"pgas_graph_{name}": StepContender(_GRAPH | keys) for name, keys in (_ABLATION | _OTHERS).items()},
}
GROUPS = {
    "strongest": tuple(f"torchrec_strongest{name}" for name in _STRONGEST),
    "ablation": ("pgas", *(f"pgas_graph_{name}" for name in _ABLATION)),
}
"""Names that stand for several contenders."""

# Those that `bench step` times where none are named.
USUAL = ("torchrec", "torchrec_strongest", "pgas", "fused", "fused_graph", "pgas_graph")


def expand(names: Sequence[str]) -> tuple[str, ...]:
    """Return the contenders that `names` stand for, each once, in their order."""
    return tuple(dict.fromkeys(each for name in names for each in GROUPS.get(name, (name,))))


def heats(names: Sequence[str], at_once: int) -> list[tuple[str, ...]]:
    """Return groups of at most `at_once` contenders, which share a GPU's memory and take turns.

    The last contender is in every group, so that each of the others is timed beside it.

    Example: a, b, c, d, e, three at once: (a, b, e), (c, d, e).
    """
    *others, last = names
    size = max(1, at_once - 1)
    return [(*others[at : at + size], last) for at in range(0, max(1, len(others)), size)]


def contender_config(config: Config, contender: StepContender, device_type: str) -> Config:
    """Return `config` with the contender's keys; on a CPU without CUDA graphs of the dense part.

    Raises:
        InputError: if the keys do not go together with the others.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key, value in contender.keys.items():
        section, name = key.split(".")
        needs_gpu = key == "train.graph_dense"
        sections.setdefault(section, {})[name] = False if needs_gpu and device_type == "cpu" else value
    return replace(config, **{section: replace(getattr(config, section), **keys) for section, keys in sections.items()})
