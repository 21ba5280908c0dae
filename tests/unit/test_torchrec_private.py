"""The private API of TorchRec and FBGEMM: where it is imported, whether its lists are complete, and their check."""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.sharding import dp_sharding

from dlrm_overlap import (
    FusedTables,
    OverlapEmbeddingBagCollectionSharder,
    OverlapEmbeddingCollectionSharder,
    explain,
    torchrec_private,
)
from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.embedding.configured_sharders import build_sharders
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.sharded_module import OverlapShardedEmbeddingBagCollection
from dlrm_overlap.embedding.sharded_unpooled import OverlapShardedEmbeddingCollection
from dlrm_overlap.torchrec_private import (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    SplitTableBatchedEmbeddingBagsCodegen,
    check,
    fbgemm,
)
from dlrm_overlap.torchrec_private.used import CLASSES, FUSED_LOOKUP, OPERATORS, OPTIMIZER_ARGS, Used
from tests.conftest import refuses

# As the docstring of dlrm_overlap.torchrec_private says.
PUBLIC_MODULES = (
    *(f"torchrec.{name}" for name in ("datasets", "models", "modules", "optim", "streamable", "sparse.jagged_tensor")),
    *(f"torchrec.distributed.{name}" for name in ("fbgemm_qcomm_codec", "model_parallel", "planner", "sharding_plan")),
    *(f"torchrec.distributed.{name}" for name in ("train_pipeline", "types")),
    "fbgemm_gpu.split_embedding_configs",
)
PUBLIC_NAMES = {"EmbeddingBagCollectionSharder", "EmbeddingCollectionSharder", "EmbeddingComputeKernel"}
OURS = [
    path
    for folder in ("data", "dlrm_overlap")
    for path in Path(folder).rglob("*.py")
    if any(name in path.read_text() for name in ("torchrec", "fbgemm"))
]

ROWS = {place.partition(":")[2]: used for place, used in CLASSES.items()}
ROWS |= {"SplitTableBatchedEmbeddingBagsCodegen": FUSED_LOOKUP, "OptimizerArgs": Used({}, OPTIMIZER_ARGS)}
# Variables of type Any, by file.
_TBE = {"tbe": ["SplitTableBatchedEmbeddingBagsCodegen"]}
_TABLES = {
    "sharding": ["TwPooledEmbeddingSharding"],
    "group": ["GroupedEmbeddingConfig"],
    "config": ["GroupedEmbeddingConfig"],
    "table": ["ShardedEmbeddingTable"],
}
VARIABLES = {
    "dlrm_overlap/embedding/layout.py": {"table": ["ShardedEmbeddingTable"]},
    "dlrm_overlap/embedding/replicated.py": {"lookup": ["DenseTableBatchedEmbeddingBagsCodegen"]},
    "dlrm_overlap/embedding/shardings.py": _TABLES,
    "dlrm_overlap/embedding/steps.py": {"given": ["OptimizerArgs"]},
    "dlrm_overlap/embedding/unsupported.py": _TABLES,
} | {
    f"dlrm_overlap/{file}.py": _TBE
    for file in ("embedding/fused_tables", "embedding/tables", "torchrec_private/fbgemm", "train/stepping")
}


@cache
def _nodes(path: Path) -> list[Any]:
    return list(ast.walk(ast.parse(path.read_text())))


def _is_public(module: str, name: str) -> bool:
    return name in PUBLIC_NAMES or any(f"{module}.".startswith(f"{public}.") for public in PUBLIC_MODULES)


def test_private_modules_are_imported_in_one_place() -> None:
    for path in OURS:
        for node in _nodes(path):
            imported = [(alias.name, "") for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                imported = [(node.module or "", alias.name) for alias in node.names]
            for module, name in imported:
                if module.partition(".")[0] in ("torchrec", "fbgemm_gpu") and path.parent.name != "torchrec_private":
                    where = f"{path}, line {node.lineno}"
                    assert _is_public(module, name), f"{where}: import {name} from dlrm_overlap.torchrec_private"


def test_every_name_that_is_imported_there_is_used() -> None:
    nodes = {path: [node for node in _nodes(path) if isinstance(node, ast.ImportFrom)] for path in OURS}
    package = "dlrm_overlap.torchrec_private"
    used = {each.name for of in nodes.values() for node in of if node.module == package for each in node.names}
    imported = [node for node in nodes[Path(*package.split("."), "__init__.py")] if not _is_ours(node.module)]
    assert {each.name for node in imported for each in node.names} == used - {"fbgemm"}


def _is_ours(module: str | None) -> bool:
    return module is not None and module.startswith("dlrm_overlap.")


def _names(used: Used) -> set[str]:
    return {*used.methods, *used.attributes.split()}


def _uses(path: Path) -> Iterator[tuple[list[str], str]]:
    """Yield (names of classes, attribute) for each attribute of a listed class, or of a variable of such a class."""
    for outer in _nodes(path):
        if isinstance(outer, ast.Attribute) and isinstance(outer.value, ast.Name) and outer.value.id in ROWS:
            yield [outer.value.id], outer.attr
        if not isinstance(outer, ast.FunctionDef):
            continue
        classes: dict[str, list[str]] = dict(VARIABLES.get(str(path), {}))
        for argument in (*outer.args.args, *outer.args.kwonlyargs):
            annotation = ast.walk(argument.annotation) if argument.annotation else ()
            named = [node.id for node in annotation if isinstance(node, ast.Name) and node.id in ROWS]
            classes |= {argument.arg: named} if named else {}
        for node in ast.walk(outer):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in classes:
                yield classes[node.value.id], node.attr


def test_attributes_of_typed_variables_are_listed() -> None:
    uses = [use for path in OURS for use in _uses(path)]
    private = {place.partition(":")[2] for place in CLASSES if not _is_public(*place.split(":"))}
    private |= {"SplitTableBatchedEmbeddingBagsCodegen", "OptimizerArgs"}
    for classes, name in uses:
        if name.startswith("_") or private.issuperset(classes):
            assert name in dir(nn.Module()) or any(name in _names(ROWS[each]) for each in classes), (classes, name)
    assert (["MLP"], "_mlp") in uses
    assert (["WeightDecayMode"], "COUNTER") in uses
    assert (["SplitTableBatchedEmbeddingBagsCodegen"], "iter_cpu") in uses
    assert (["ShardedEmbeddingTable"], "local_cols") in uses


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (OverlapShardedEmbeddingBagCollection, ShardedEmbeddingBagCollection),
        (OverlapShardedEmbeddingCollection, ShardedEmbeddingCollection),
        (FusedTables, SplitTableBatchedEmbeddingBagsCodegen),
    ],
)
def test_attributes_of_self_are_listed(ours: type, theirs: type) -> None:
    classes = [ours] + [ExchangingModule] * issubclass(ours, ExchangingModule)
    nodes = [node for cls in classes for node in ast.walk(ast.parse(inspect.getsource(cls)))]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    of_self = [node for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"]
    calls = {node.attr for node in attributes if ast.unparse(node.value) == "super()"}
    stored = {node.attr for node in of_self if isinstance(node.ctx, ast.Store)}
    known = {name for cls in classes for name in vars(cls)} | stored | _names(ROWS[theirs.__name__])
    assert {node.attr for node in of_self} - known - {*dir(nn.Module())} == set()
    assert calls - {*vars(ExchangingModule), *dir(nn.Module)} - _names(ROWS[theirs.__name__]) == set()


def test_methods_that_are_overridden_are_listed() -> None:
    importlib.import_module("dlrm_overlap.train.graphs.train_pipeline")
    found = set()
    for place, used in CLASSES.items():
        module, _, name = place.partition(":")
        cls = getattr(importlib.import_module(module), name)
        for ours in type.__subclasses__(cls):
            if ours.__module__.startswith("dlrm_overlap."):
                functions = {each for each, member in vars(ours).items() if isinstance(member, FunctionType | property)}
                assert functions & {*dir(cls)} <= _names(used), ours
                found.add(name)
    assert {"EmbeddingBagCollectionSharder", "KeyedJaggedTensor", "LazyAwaitable", "CombinedOptimizer"} <= found


def test_operators_are_listed() -> None:
    attributes = [node for path in OURS for node in _nodes(path) if isinstance(node, ast.Attribute)]
    of_fbgemm = [each for each in attributes if isinstance(each.value, ast.Attribute) and each.value.attr == "fbgemm"]
    called = {each.attr for each in of_fbgemm if ast.unparse(each.value) == "torch.ops.fbgemm"}
    assert called == OPERATORS.keys()


def test_the_installed_releases_have_all_that_is_listed() -> None:
    assert check.find_changes() == []


def _without_name(code: CodeType, name: str) -> CodeType:
    return code.replace(
        co_names=tuple(f"new{each}" if each == name else each for each in code.co_names),
        co_consts=tuple(_without_name(each, name) if isinstance(each, CodeType) else each for each in code.co_consts),
    )


def _rename_attribute(patch: pytest.MonkeyPatch, cls: type, name: str) -> None:
    for base in cls.__mro__[:-1]:
        for member in vars(base).values():
            if isinstance(member, FunctionType) and member.__module__.startswith("torchrec"):
                patch.setattr(member, "__code__", _without_name(member.__code__, name))


def _with_another_lookup(patch: pytest.MonkeyPatch) -> None:
    real = fbgemm.lookup_without_memory

    def make(optimizer: str) -> Any:
        lookup = real(optimizer)
        del lookup.lxu_cache_weights
        return lookup

    patch.setattr(fbgemm, "lookup_without_memory", make)


def _with_another_operator(patch: pytest.MonkeyPatch) -> None:
    real = fbgemm.argument_names
    patch.setattr(fbgemm, "argument_names", lambda operator: [*real(operator), "scale"])


def _with_a_longer_schema(patch: pytest.MonkeyPatch) -> None:
    arguments = [SimpleNamespace(name=name, has_default_value=lambda: False) for name in ("unused", "T", "B", "bits")]
    overload = SimpleNamespace(_schema=SimpleNamespace(arguments=arguments))
    patch.setattr(torch.ops.fbgemm, "get_infos_metadata", SimpleNamespace(default=overload))


def _fail_to_make(*_: Any, **__: Any) -> None:
    raise AssertionError("no such\noptimizer")


def _with_another_parameter(self: Any, ctx: Any, inputs: Any) -> None:
    pass


def _with_any_parameters(*args: Any, **kwargs: Any) -> None:
    pass


def _with_one_more(self: Any, ctx: Any, dist_input: Any, stream: Any, hint: Any = None) -> None:
    pass


MADE_UP: dict[str, tuple[Callable[[pytest.MonkeyPatch], Any], list[str]]] = {
    "import": (
        lambda patch: patch.delattr(dp_sharding, "DpPooledEmbeddingSharding"),
        ["torchrec.distributed.sharding.dp_sharding.DpPooledEmbeddingSharding is gone"],
    ),
    "module": (
        lambda patch: patch.setitem(sys.modules, "fbgemm_gpu.quantize_comm", None),
        ["fbgemm_gpu.quantize_comm.QuantizedCommCodec is gone"],
    ),
    "method": (
        lambda patch: patch.delattr(ShardedEmbeddingBagCollection, "_create_input_dist"),
        ["ShardedEmbeddingBagCollection._create_input_dist is gone"],
    ),
    "parameter": (
        lambda patch: patch.setattr(ShardedEmbeddingBagCollection, "compute", _with_another_parameter),
        [
            "ShardedEmbeddingBagCollection.compute has no parameter dist_input",
            "ShardedEmbeddingBagCollection.compute requires a parameter inputs",
        ],
    ),
    "required parameter": (
        lambda patch: patch.setattr(ShardedEmbeddingCollection, "compute", _with_one_more),
        ["ShardedEmbeddingCollection.compute requires a parameter stream"],
    ),
    "wrapped method": (lambda patch: patch.setattr(ShardedEmbeddingCollection, "compute", _with_any_parameters), []),
    "attribute": (
        lambda patch: _rename_attribute(patch, ShardedEmbeddingCollection, "_embedding_names_per_sharding"),
        ["ShardedEmbeddingCollection._embedding_names_per_sharding is gone"],
    ),
    "attribute of a fused lookup": (
        _with_another_lookup,
        ["SplitTableBatchedEmbeddingBagsCodegen.lxu_cache_weights is gone"],
    ),
    "fused lookup": (
        lambda patch: patch.setattr(fbgemm, "SplitTableBatchedEmbeddingBagsCodegen", _fail_to_make),
        [
            f"SplitTableBatchedEmbeddingBagsCodegen for {optimizer} is not made (AssertionError: no such optimizer)"
            for optimizer in fbgemm.LOOKUP_OPTIMIZERS
        ],
    ),
    "argument of the backward operator": (
        _with_another_operator,
        ["FBGEMM's backward operator has an unknown argument scale"],
    ),
    "schema of another operator": (
        _with_a_longer_schema,
        ["torch.ops.fbgemm.get_infos_metadata requires a parameter bits"],
    ),
}


@pytest.mark.parametrize("kind", MADE_UP)
def test_a_change_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, expected = MADE_UP[kind]
    change(monkeypatch)
    assert check.find_changes() == expected


def test_every_change_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = "method", "attribute", "attribute of a fused lookup"
    for kind in kinds:
        MADE_UP[kind][0](monkeypatch)
    assert check.find_changes() == [line for kind in kinds for line in MADE_UP[kind][1]]


@pytest.fixture
def unchecked() -> Iterator[None]:
    check.check_private_api.cache_clear()
    yield
    check.check_private_api.cache_clear()


@pytest.mark.usefixtures("unchecked")
def test_our_sharders_refuse_another_release_and_torchrecs_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        MADE_UP["method"][0](patch)
        (change,) = MADE_UP["method"][1]
        use, instead = r"use TorchRec \d\.\d to \d\.\d \(pip install .*\)", r"or embedding\.backend: torchrec \(.*\)"
        rule = rf"^TorchRec [\d.]+: {change}; {use}, {instead}$"
        with refuses(rule):
            OverlapEmbeddingBagCollectionSharder()
        with refuses(rule):
            OverlapEmbeddingCollectionSharder()
        with refuses(rule):
            build_sharders(EmbeddingConfig(backend="pgas"))
        with refuses(rule):
            explain(nn.Linear(1, 1))
        build_sharders(EmbeddingConfig(backend="torchrec"))
    OverlapEmbeddingBagCollectionSharder()  # looks again after an error
    MADE_UP["method"][0](monkeypatch)
    OverlapEmbeddingBagCollectionSharder()  # and not after it has found no change


def test_an_import_that_fails_names_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("import", "method"):
        MADE_UP[kind][0](monkeypatch)
    with refuses(rf"^TorchRec .*: {MADE_UP['import'][1][0]}, {MADE_UP['method'][1][0]}; use TorchRec .*\)$"):
        importlib.reload(torchrec_private)


def test_a_module_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> Any:
        raise ImportError("libcudart.so.13: cannot open shared object file\nand more")

    monkeypatch.setattr(check, "import_module", fail)
    found = check.find_changes()
    reason = "libcudart.so.13: cannot open shared object file and more"
    assert f"torchrec.sparse.tensor_dict cannot be imported ({reason})" in found
    assert len(found) == len(set(found))
