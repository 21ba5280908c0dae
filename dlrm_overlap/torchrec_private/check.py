"""Checks whether the installed TorchRec and FBGEMM have what `used` lists and what this package imports."""

import ast
import inspect
import logging
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

from dlrm_overlap.config import InputError, in_one_line
from dlrm_overlap.launching.supported_versions import STACKS, build, install_command, version_of
from dlrm_overlap.torchrec_private.used import CLASSES, FUSED_LOOKUP, OPERATORS, OPTIMIZER_ARGS, Used


@cache  # a call that raises looks again
def check_private_api() -> None:
    """Raise an InputError that names all that has changed in the installed TorchRec and FBGEMM.

    The first call takes some 20 ms. Call it before our exchange is used; TorchRec's own needs no check.
    """
    if changes := find_changes():
        raise refusal(changes, ", or embedding.backend: torchrec (in your program TorchRec's sharders)")


def refusal(changes: Sequence[str], instead: str = "") -> InputError:
    """Return the error for releases with these changes, which names the releases that work, then what works instead."""
    releases = sorted([int(part) for part in stack.torchrec.split(".")[:2]] for stack in STACKS)
    oldest, newest = (".".join(map(str, releases[i])) for i in (0, -1))
    return InputError(
        f"TorchRec {version_of('torchrec')}: {', '.join(changes)}; use TorchRec {oldest} to {newest} "
        f"({install_command(build())}){instead}"
    )


class _ChangedError(Exception):
    pass


def find_changes() -> list[str]:
    """Return what the installed releases lack, or ask for in addition; empty if they have all that is used."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)  # FBGEMM logs each lookup that is made
    try:
        imports, operators = list(_import_changes()), list(_operator_changes())
        lookups = [] if imports or operators else _fused_lookup_changes()  # which needs them
        return list(dict.fromkeys((*imports, *_class_changes(), *operators, *lookups)))
    finally:
        logging.disable(level)


def _import_changes() -> Iterator[str]:
    for node in ast.walk(ast.parse(Path(__file__).with_name("__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("dlrm_overlap"):
            for alias in node.names:
                try:
                    _resolve(node.module, alias.name)
                except _ChangedError as error:
                    yield str(error)


def _class_changes() -> Iterator[str]:
    for place, used in CLASSES.items():
        try:
            cls = _resolve(*place.split(":"))
        except _ChangedError as error:
            yield str(error)
            continue
        yield from _method_changes(cls, used)
        known = _names_in(cls)
        yield from (f"{cls.__name__}.{name} is gone" for name in used.attributes.split() if name not in known)


def _resolve(module: str, name: str) -> Any:
    """Return `name` of a module; a _ChangedError says that it is gone, or why the module cannot be imported."""
    try:
        return getattr(import_module(module), name)
    except AttributeError:
        pass
    except ImportError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _ChangedError(f"{module} cannot be imported ({in_one_line(error)})") from error
    raise _ChangedError(f"{module}.{name} is gone")


def _method_changes(cls: type, used: Used) -> Iterator[str]:
    for method, names in used.methods.items():
        title, passed = f"{cls.__name__}.{method}", names.split()
        if not callable(getattr(cls, method, None)):
            yield f"{title} is gone"
            continue
        parameters = inspect.signature(getattr(cls, method)).parameters.values()
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        required = {each.name for each in named if each.default is each.empty} - {"self"}
        if len(named) < len(parameters):  # it takes any, as a wrapper may
            passed = [each.name for each in named]
        yield from _parameter_changes(title, passed, [each.name for each in named], required)


def _parameter_changes(
    title: str, passed: Collection[str], known: Collection[str], required: Collection[str]
) -> Iterator[str]:
    yield from (f"{title} has no parameter {name}" for name in passed if name not in known)
    yield from (f"{title} requires a parameter {name}" for name in known if name in required and name not in passed)


def _names_in(cls: type) -> set[str]:
    """Return the names that TorchRec's classes in `cls.__mro__` define, annotate, or use in the code of a method.

    An attribute that is gone is not noticed while a method uses its name, such as `name`, of another object.
    """
    found = set(dir(cls))
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in ("abc", "builtins", "torch", "typing"):
            found |= inspect.get_annotations(base).keys()
            for member in vars(base).values():
                functions = [member.fget, member.fset] if isinstance(member, property) else [member]
                for function in functions:
                    function = inspect.unwrap(getattr(function, "__func__", function))
                    if inspect.isfunction(function):
                        found |= _names_in_code(function.__code__)
    return found


def _names_in_code(code: CodeType) -> set[str]:
    found = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    return found.union(*(_names_in_code(each) for each in code.co_consts if isinstance(each, CodeType)))


def _operator_changes() -> Iterator[str]:
    import torch

    for name, passed in OPERATORS.items():
        title = f"torch.ops.fbgemm.{name}"
        if not hasattr(torch.ops.fbgemm, name):
            yield f"{title} is gone"
            continue
        arguments = getattr(torch.ops.fbgemm, name).default._schema.arguments
        required = {each.name for each in arguments if not each.has_default_value()}
        yield from _parameter_changes(title, passed.split(), [each.name for each in arguments], required)


def _fused_lookup_changes() -> Iterator[str]:
    """Yield what lookups without memory lack, one for each optimizer, and unknown arguments of their operators."""
    from dlrm_overlap.torchrec_private import SplitTableBatchedEmbeddingBagsCodegen as Lookup
    from dlrm_overlap.torchrec_private import fbgemm

    yield from _method_changes(Lookup, FUSED_LOOKUP)
    changes = dict[str, None]()  # each once, in order
    for optimizer in fbgemm.LOOKUP_OPTIMIZERS:
        try:
            tbe = fbgemm.lookup_without_memory(optimizer)
        except Exception as error:  # of any type, most are assertions
            yield f"{Lookup.__name__} for {optimizer} is not made ({type(error).__name__}: {in_one_line(error)})"
            continue
        buffers = [f"{name}_{memory}" for name in fbgemm.STATE_BUFFERS[optimizer] for memory in ("dev", "host", "uvm")]
        gone = [name for name in (*FUSED_LOOKUP.attributes.split(), *buffers) if not hasattr(tbe, name)]
        changes |= dict.fromkeys(f"{Lookup.__name__}.{name} is gone" for name in gone)
        if "optimizer_args" not in gone:
            without = [name for name in OPTIMIZER_ARGS.split() if not hasattr(tbe.optimizer_args, name)]
            changes |= dict.fromkeys(f"{Lookup.__name__}.optimizer_args.{name} is gone" for name in without)
        for weighted in (False, True):
            try:
                operator = fbgemm.backward_operator(optimizer, weighted)
            except AttributeError:
                if optimizer in fbgemm.ON_CPUS:
                    changes[f"FBGEMM's backward operator for {optimizer} is gone"] = None
                continue
            unknown = [] if gone else fbgemm.unknown_arguments(tbe, operator)
            changes |= dict.fromkeys(f"FBGEMM's backward operator has an unknown argument {name}" for name in unknown)
    yield from changes
