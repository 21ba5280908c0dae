"""The contenders of `bench step`: keys, and what `figures.step.build` adds to them. Does not import torch."""

from collections.abc import Mapping, Sequence
from typing import Any

Keys = Mapping[str, Any]


def _keys(backend: str, pipeline: str = "torchrec", dense: bool = True) -> Keys:
    """Return a contender's keys. If `dense`, its dense part is compiled and, unless the step is captured, captured."""
    return {
        "embedding.backend": backend,
        "train.pipeline": pipeline,
        "train.compile_dense": dense,
        "train.graph_dense": dense and pipeline == "torchrec",
    }


_WHOLE, _DEFAULT = {"embedding.plan": "table_wise"}, {"embedding.plan": "torchrec"}
_FP32, _BF16 = {"embedding.wire_dtype": "fp32"}, {"embedding.wire_dtype": "bf16"}
_EAGER = {"train.compile_dense": False}

# TorchRec at its strongest is the fastest of these; which one depends on the model and the machine.
_STRONGEST: Mapping[str, Keys] = {
    "": {},
    "_table_wise": _WHOLE,
    "_captured": _EAGER,
    "_compiled": {"train.graph_dense": False},
    "_bf16": _BF16,
    "_bf16_table_wise": _BF16 | _WHOLE,
    "_fp16": {"embedding.wire_dtype": "fp16"},
    "_default_plan": _DEFAULT,
    "_fused_pipeline": {},
    "_bf16_gradients": {},
    "_async_copy": {},
    "_default_plan_async_copy": _DEFAULT,
    "_bf16_biases": {},
    "_default_plan_bf16_biases": _DEFAULT,
    "_registered": {},
}
# For a model with unpooled tables.
_STRONGEST_UNPOOLED: Mapping[str, Keys] = {"_index_dedup": {}, "_bf16_index_dedup": _BF16}
# Compiles the whole model, which takes minutes.
_COMPILED_WHOLE: Mapping[str, Keys] = {"_pt2": {"train.compile_dense": False, "train.graph_dense": False}}
# TorchRec's exchange with our dense part: not TorchRec's step, so never the baseline of a speedup.
OUR_DENSE = "torchrec_our_dense"
_OUR_DENSE: Mapping[str, Keys] = {"": {}, "_table_wise": _WHOLE, "_default_plan": _DEFAULT, "_bf16": _BF16}
_ABLATION: Mapping[str, Keys] = {
    "no_capture": {"train.capture": False},
    "no_compile": _EAGER,
    "no_flat": {"train.flat_dense": False},
    "fp32_wire": _FP32,
    "collective": {"train.dense_reduce": "collective"},
    "no_balance": _WHOLE,
}
_OTHERS: Mapping[str, Keys] = {
    "default_plan": _DEFAULT,
    "update_on_all": {"train.dense_update": "all"},
    "last_bucket_deferred": {"train.dense_update": "owner_deferred"},
    "cross_triton": {"train.cross_kernel": "triton"},
    "cross_cutlass": {"train.cross_kernel": "cutlass"},
    "tensor": {"model.top_parallel": "tensor"},
    "2_emulated_nodes": {"embedding.nodes": 2, "embedding.internode": "messages"},
    "2_emulated_nodes_puts": {"embedding.nodes": 2, "embedding.internode": "puts"},
}
_GRAPH = _keys("pgas", "graph")

STEP_CONTENDERS: Mapping[str, Keys] = {
    "torchrec": _keys("torchrec", dense=False),  # as users run it
    **{
        f"torchrec_strongest{name}": {**_keys("torchrec"), **keys}
        for name, keys in (_STRONGEST | _STRONGEST_UNPOOLED | _COMPILED_WHOLE).items()
    },
    **{
        f"{OUR_DENSE}{name}": {**_keys("torchrec"), "train.graph_dense": False, **keys}
        for name, keys in _OUR_DENSE.items()
    },
    "drop_in": {**_keys("pgas", dense=False), **_FP32},
    "drop_in_torchrec_ids": {**_keys("pgas", dense=False), **_FP32},
    "drop_in_graph": {**_GRAPH, **_EAGER, **_FP32, "train.flat_dense": False},
    "pgas": _keys("pgas"),
    "fused": _keys("fused"),
    "fused_graph": _keys("fused", "graph"),
    "pgas_graph": _GRAPH,
    **{f"pgas_graph_{name}": {**_GRAPH, **keys} for name, keys in (_ABLATION | _OTHERS).items()},
}
GROUPS = {
    "strongest": tuple(f"torchrec_strongest{name}" for name in _STRONGEST),
    "our_dense": tuple(f"{OUR_DENSE}{name}" for name in _OUR_DENSE),
    "ablation": ("pgas", *(f"pgas_graph_{name}" for name in _ABLATION)),
}

# The default of `bench step`.
USUAL = ("torchrec", "torchrec_strongest", "pgas", "fused", "fused_graph", "pgas_graph")


def is_torchrec(name: str) -> bool:
    """Return whether nothing of ours is in the contender's step, so that it counts as a baseline."""
    return name.startswith("torchrec") and not name.startswith(OUR_DENSE)


def expand(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each for name in names for each in GROUPS.get(name, (name,))))


def split_into_groups(names: Sequence[str], at_once: int) -> list[tuple[str, ...]]:
    """Split contenders into groups of at most `at_once`, which fit a GPU; the last contender is in every group.

    Example: a, b, c, d, e, three at once: (a, b, e), (c, d, e).
    """
    *others, last = names
    size = max(1, at_once - 1)
    return [(*others[at : at + size], last) for at in range(0, max(1, len(others)), size)]
