"""Reads the configuration: YAML files, then dotted options."""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import itertools
import json
import logging
import os
import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin

import yaml

from dlrm_overlap.config import RENAMED_KEYS, RENAMED_VALUES, FullPath, InputError, in_one_line
from dlrm_overlap.launching.launcher import LAUNCHER_PID, announced_rank

Sections = TypeVar("Sections")
log = logging.getLogger("dlrm_overlap")

_CONFIGS = Path(__file__).parents[1] / "configs"
_MAX_SHOWN = 200  # characters of a value
# Raised by PyYAML if a text is not YAML, or a tag's value is wrong, as in `!!int ''`.
NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
_NULLS = ("null", "Null", "NULL", "~")  # in YAML
# Key of a file -> option that replaces it, since both give the samples of a step.
_REPLACED_BY = {"train.global_batch_size": "train.batch_size"}
# What other programs call a key.
_OTHER_NAMES = {"learning_rate": "lr"}
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list of one or more, as in '[64, 16]'",
    NoneType: "null",
}


def words_of(kind: Any) -> str:
    """Return a description of a type, such as "a number from 0 to below 1 or null"."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return arguments[1].words
    if origin is Literal:
        return "one of " * (len(arguments) > 1) + ", ".join(map(repr, arguments))
    if origin in (Union, UnionType):
        first, *others = arguments
        *words, last = ["a list of such" if get_origin(each) is list else words_of(each) for each in others]
        return f"{', '.join([words_of(first), *words])} or {last}"
    if kind == list[str]:
        return "a list of one or more texts, numbers among them in quotes, as in ['NA', '-1']"
    return _WORDS[origin or kind]


def convert(kind: Any, value: Any, text: str | None = None) -> Any:
    """Return a YAML value as a value of type `kind`, or raise ValueError.

    `text` is the option's text from which `value` was read, or None if `value` is from a file.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        found = convert(arguments[0], value, text)
        if arguments[1].holds(found):
            return found
    elif origin in (Union, UnionType):
        for each in sorted(arguments, key=lambda each: str in (each, *get_args(each))):  # str last: it takes any text
            with contextlib.suppress(ValueError):
                return convert(each, value, text)
    elif origin is Literal:
        found = value if text is None else text
        if found in arguments:
            return found
    elif origin is list and isinstance(value, list):
        if value:
            return [convert(arguments[0], each) for each in value]
    elif kind is str and (text is not None or isinstance(value, str)):
        return value if text is None else text
    elif kind is str and isinstance(value, date):  # YAML reads 2026-11-20 as a date
        return value.isoformat()
    elif kind is float and type(value) in (int, float, str):
        with contextlib.suppress(OverflowError):
            return float(value)  # YAML reads 1e-4 as a string
    elif kind in (int, bool, NoneType) and type(value) is kind:
        return value
    raise ValueError


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}.."


def _is_quoted(value: Any) -> bool:
    """Return whether `value` of a YAML file is text that without its quotes would be something else."""
    with contextlib.suppress(*NOT_YAML):
        return isinstance(value, str) and not isinstance(yaml.safe_load(value), str)
    return False


def _option_of(kind: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value: Any = text
        with contextlib.suppress(*NOT_YAML):
            value = yaml.safe_load(text) if text else text
        if value is None and text.strip() not in _NULLS:  # such as "#1", which is a comment
            value = text
        try:
            return convert(kind, value, text)
        except ValueError:
            shown = str(value) if isinstance(value, list) else in_one_line(text) or "''"
            raise ArgumentTypeError(f"{_cut(shown)} is not {words_of(kind)}") from None

    return read


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys instead of taking the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise InputError(
                    f"{key.start_mark.name}, line {key.start_mark.line + 1}: key {key.value!r} is written twice in one "
                    f"section; keep one"
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def find_config(given: str) -> Path:
    """Return the path of the YAML file `given`, or of the packaged file of that name."""
    own = _CONFIGS / f"{given.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    return own if os.path.isfile(own) and not os.path.isfile(given) else Path(given)


def _check_not_a_pipe(path: Path) -> None:
    """Raise an `InputError` if only the first process that reads `path` finds its content, as in `--config <(..)`."""
    if os.path.isfile(path) or os.path.isdir(path):
        return
    # A launcher closes the shell's descriptor, so the path may be missing here.
    if os.path.exists(path) or str(path).startswith(("/dev/fd/", "/proc/")):
        raise InputError(f"--config: {path} is a pipe or a device, and each rank reads it; write it to a file first")


def _read_file(path: Path, config: type) -> dict[str, Any]:
    try:
        with path.open("rb") as file:  # UTF-8 under every locale
            tree = yaml.load(file, UniqueKeyLoader)
    except OSError as error:
        names = sorted(str(own.relative_to(_CONFIGS).with_suffix("")) for own in _CONFIGS.rglob("*.yaml"))
        cure = f"give an existing YAML file, or the name of a packaged one: {suggest(path.stem, names)}"
        raise InputError(f"--config: {path}: {error.strerror}; {cure}") from None
    except InputError:
        raise
    except NOT_YAML as error:
        raise InputError(f"--config: {path} is not YAML in UTF-8: {in_one_line(error)}; correct it") from None
    return read_tree(tree, config, path)


def new_name(key: str) -> str:
    """Return the current name of a key; warns if it was renamed."""
    if key not in RENAMED_KEYS:
        return key
    _warn_of_earlier_name(key, RENAMED_KEYS[key])
    return RENAMED_KEYS[key]


def new_value(key: str, value: Any) -> Any:
    """Return the current name of a value; warns if it was renamed."""
    names = RENAMED_VALUES.get(key, {})
    if not isinstance(value, str) or value not in names:
        return value
    _warn_of_earlier_name(f"{key}: {value}", names[value])
    return names[value]


def _warn_of_earlier_name(earlier: str, name: str) -> None:
    if announced_rank() in (None, 0) and LAUNCHER_PID not in os.environ:  # the launcher of --nproc has read the same
        log.warning("%s is deprecated; use %s", earlier, name)


def with_new_names(argv: Sequence[str]) -> list[str]:
    renamed = list[str]()
    for word in argv:
        key, equals, value = word.partition("=")
        if key.startswith("--"):
            key = f"--{new_name(key[2:])}"
            renamed.append(f"{key}={new_value(key[2:], value)}" if equals else key)
        else:
            renamed.append(new_value(renamed[-1][2:], word) if renamed else word)
    return renamed


def read_tree(tree: Any, section: type, path: Path | str, prefix: str = "") -> dict[str, Any]:
    """Return the values of `tree` by dotted key; `section` is the dataclass that has the keys.

    Mistakes raise an `InputError`, which names the file `path`, the key with `prefix`, and the nearest known key or the
    rule for the value.
    """
    if not isinstance(tree, dict):
        raise InputError(
            f"{path}: {prefix.rstrip('.') or 'the file'} must be a section of keys, not {tree!r}; indent them below it"
        )
    kinds: dict[str, Any] = {each.name: each.type for each in dataclasses.fields(section)}
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in kinds and key in RENAMED_KEYS:
            key = new_name(key)
            name = key.rpartition(".")[2]
        if name not in kinds:
            raise InputError(f"{path}: {key} is not a key; {suggest(str(name), list(kinds), prefix)}")
        if dataclasses.is_dataclass(kinds[name]):
            found |= read_tree(value, kinds[name], path, f"{key}.")
            continue
        if get_origin(kinds[name]) is Mapping:
            found[key] = _read_members(value or {}, get_args(kinds[name])[1], path, key)
            continue
        try:
            found[key] = convert(kinds[name], new_value(key, value))
        except ValueError:
            shown = "null" if value is None else in_one_line(repr(value) if _is_quoted(value) else str(value))
            raise InputError(f"{path}: {key}: {_cut(shown)} is not {words_of(kinds[name])}") from None
    return found


def section_of(tree: Any, section: type[Sections], path: Path | str) -> Sections:
    """Return the section that `tree` describes, such as a part of a stored configuration; see `read_tree`."""
    return section(**_changes(section, read_tree(tree, section, path)))


def _read_members(tree: Any, member: type, path: Path | str, key: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise InputError(
            f"{path}: {key}: {tree!r} must be sections by name, each with its keys, or NAME: {{}} without keys"
        )
    made = {}
    for name, keys in tree.items():
        if name is None or isinstance(name, bool):  # written as no, on, null, ..
            raise InputError(f"{path}: {key}: YAML reads a name in it as {json.dumps(name)}; write it in quotes")
        prefix = f"{key}.{name}."
        values = read_tree(keys or {}, member, path, prefix)
        made[str(name)] = member(**{each.removeprefix(prefix): value for each, value in values.items()})
    return made


def suggest(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Return "did you mean X?" with the most similar of `known`, or a list of all, each shown after `prefix`."""
    close = nearest(_OTHER_NAMES.get(name, name), known)
    return f"did you mean {prefix}{close}?" if close else f"known: {', '.join(prefix + each for each in known)}"


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the name in `known` that is most similar to `name`, ignoring case; None if none is similar."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def _suggest_option(name: str, known: Sequence[str]) -> str:
    name = name.lstrip("-").replace("-", "_")
    section, _, key = name.rpartition(".")
    is_section = any(each.startswith(f"--{section}.") for each in known)
    prefix = f"--{section}." if is_section else "--"
    key = _OTHER_NAMES.get(key, key)
    if prefix + key in known:
        found = [prefix + key]
    elif not (found := [each for each in known if re.fullmatch(rf"--(.*\.)?{re.escape(key)}", each)]):
        # Within a section, only keys are compared: with its name, all of them would be similar.
        own = [each.removeprefix(prefix) for each in known if each.startswith(prefix)]
        close = nearest(key if is_section else name, own)
        found = [prefix + close] if close else []
    return f"did you mean {' or '.join(found)}?" if found else "--help tells the options"


class Parser(ArgumentParser):
    """Argument parser with mistakes in one line, types such as `PositiveInt | None`, and defaults in the help."""

    def __init__(self, prog: str, description: str, usage: str | None = None) -> None:
        super().__init__(prog, usage, description, allow_abbrev=False)

    def add_argument(self, *names: Any, **settings: Any) -> Any:
        if "type" in settings:
            settings["type"] = _option_of(settings["type"])
        if (default := settings.get("default")) not in (None, [], SUPPRESS):
            is_all = default == settings.get("choices")
            shown = "all" if is_all else " ".join(map(str, default if isinstance(default, list) else [default]))
            settings["help"] += f" (default {shown})"
        return super().add_argument(*names, **settings)

    def read(self, argv: Sequence[str]) -> Any:
        """Parse `argv`, in which options and positional arguments may be mixed."""
        return self.parse_intermixed_args(argv)

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (([^\s=]+)\S*)", message):
            if not unknown[1].startswith("-"):
                raise InputError(f"{unknown[1]}: not an option, since it does not begin with --; see --help")
            known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            raise InputError(f"{unknown[2]} is not an option; {_suggest_option(unknown[2], known)}")
        message = message.replace("the following arguments are required", "missing on the command line")
        raise InputError(re.sub(r"^argument (?:--(?=\w+\.))?", "", in_one_line(message)) + "; see --help")


@cache  # to find a class in the source takes 10 ms
def meanings_of(section: type) -> dict[str, str]:
    """Return field -> the string below it in the source of the dataclass `section`."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


class Key(NamedTuple):
    name: str
    """name with its sections, such as train.steps"""
    kind: Any
    default: Any
    section: type


def _default_of(section: Any, field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return getattr(section, field.name, None if made is dataclasses.MISSING else made())


def keys_of(section: Any, prefix: str = "") -> Iterator[Key]:
    """Yield the keys of `section` in order. If it is an object, not a class, its values are the keys' defaults."""
    for each in dataclasses.fields(section):
        default = _default_of(section, each)
        if isinstance(each.type, type) and dataclasses.is_dataclass(each.type):
            yield from keys_of(default, f"{prefix}{each.name}.")
        else:
            yield Key(
                f"{prefix}{each.name}", each.type, default, section if isinstance(section, type) else type(section)
            )


def _help_of(key: Key) -> str:
    meaning = meanings_of(key.section)[key.name.rpartition(".")[2]]
    return f"{meaning} ({words_of(key.kind)}; default {json.dumps(key.default)})".replace("%", "%%")


def _changes(section: Any, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for each in dataclasses.fields(section):
        key = f"{prefix}{each.name}"
        if key in values:
            found[each.name] = values[key]
        elif dataclasses.is_dataclass(each.type):
            default = _default_of(section, each)
            found[each.name] = dataclasses.replace(default, **_changes(default, values, f"{key}."))
    return found


def parse_config(
    config: type[Sections],
    prog: str,
    description: str,
    argv: Sequence[str],
    add_options: Callable[[Parser], None] = lambda parser: None,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[Sections, Any]:
    """Return the configuration that `argv` describes, and the values of the options that `add_options` adds.

    `defaults` override the keys' defaults, nested as in a file. Raises `InputError` if `argv` or a file has a mistake.
    """
    parser = Parser(prog, description, usage=f"{prog} [--config FILE] [--section.key VALUE ...]")
    parser.add_argument(
        "--config",
        type=FullPath,
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file, or a name such as quickstart; options override it",
    )
    add_options(parser)
    keys = list(keys_of(config))
    asks_help = not {"-h", "--help"}.isdisjoint(argv)  # only then the help is read from the source
    for key in keys:
        text = _help_of(key) if asks_help else None
        parser.add_argument(f"--{key.name}", type=key.kind, default=SUPPRESS, metavar="VALUE", help=text)
    options = parser.read(with_new_names(argv))
    values = read_tree(defaults, config, "defaults") if defaults else {}
    has_several_readers = getattr(options, "nproc", None) is not None or announced_rank() is not None
    for file in options.config:
        path = find_config(file)
        if has_several_readers:
            _check_not_a_pipe(path)
        values |= _read_file(path, config)
    given = {key.name: vars(options).pop(key.name) for key in keys if key.name in vars(options)}
    values = {key: value for key, value in values.items() if _REPLACED_BY.get(key) not in given} | given
    return config(**_changes(config, values)), options
