"""Reading the configuration: YAML, then dotted options, every mistake told in one line."""

import dataclasses
import difflib
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from dlrm_overlap.config import Config, InputError


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which refuses a key written twice instead of taking the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping after checking that its keys differ."""
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise InputError(
                    f"{key.start_mark.name}, line {key.start_mark.line + 1}: key {key.value!r} is written twice in one "
                    f"section; keep one"
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def check_config_file(path: Path) -> None:
    """Check that `path` is YAML with known keys, each written once.

    Raises:
        InputError: telling file, key and the nearest known key.
    """
    try:
        with path.open() as file:
            tree = yaml.load(file, UniqueKeyLoader)
    except OSError as error:
        raise InputError(f"--config: {path}: {error.strerror}; give an existing YAML file, see configs/") from None
    except yaml.YAMLError as error:
        raise InputError(f"--config: {path} is not YAML: {_one_line(str(error))}; correct it") from None
    _check_keys(tree or {}, Config, "", path)


def _check_keys(tree: Any, section: type, prefix: str, path: Path) -> None:
    if not isinstance(tree, dict):
        raise InputError(
            f"{path}: {prefix.rstrip('.') or 'the file'} must be a section of keys, not {tree!r}; indent them below it"
        )
    fields = {f.name: f.type for f in dataclasses.fields(section)}
    for key, value in tree.items():
        if key not in fields:
            raise InputError(
                f"{path}: {prefix}{key} is not a key; {suggest(f'{prefix}{key}', [prefix + f for f in fields])}"
            )
        nested = fields[key]
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            _check_keys(value, nested, f"{prefix}{key}.", path)


def suggest(name: str, known: Sequence[str]) -> str:
    """Return a question after the nearest of `known`, or their list where none is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def _one_line(message: str) -> str:
    return re.sub(r"\s+", " ", message).strip()


def _parse_error(message: str) -> str:
    """Turn jsonargparse's message, which may run over many lines, into one line of key, value and rule."""
    unknown = re.match(r"[Uu]nrecognized arguments: (--[\w.]+)", message)
    if unknown:
        return f"{unknown[1]} is not an option; {suggest(unknown[1], ['--' + key for key in _flat_keys(Config)])}"
    found = re.match(r'Parser key "([^"]+)":\s*(.*)', message, re.DOTALL)
    if not found:
        return _one_line(message) + "; see --help"
    key, rule = found[1], found[2]
    if "Given value:" in rule:
        kinds = re.search(r"Subtypes: \[(.*)\]", rule)
        value = rule.rsplit("Given value:", 1)[1].strip()
        rule = f"{value} fits none of {kinds[1] if kinds else 'its types'}"
    return f"{key}: {_one_line(re.sub(r'jsonargparse.typing.|typing.', '', rule))}; see --help"


def _flat_keys(section: type, prefix: str = "") -> list[str]:
    keys = []
    for f in dataclasses.fields(section):
        nested = isinstance(f.type, type) and dataclasses.is_dataclass(f.type)
        keys += _flat_keys(f.type, f"{prefix}{f.name}.") if nested else [prefix + f.name]  # type: ignore[arg-type]
    return keys


class Parser(ArgumentParser):
    """An argument parser that tells a mistake in one line."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, exit_on_error=False)

    def read(self, argv: Sequence[str]) -> Any:
        """Return the values of `argv`, sections built.

        Raises:
            InputError: if an option is unknown or its value wrong.
        """
        try:
            return self.instantiate(self.parse_args(list(argv)))
        except ArgumentError as error:
            raise InputError(_parse_error(str(error))) from None


def parse_config(
    prog: str, description: str, argv: Sequence[str], add_options: Callable[[Parser], None]
) -> tuple[Config, Any]:
    """Return the configuration that `argv` describes, and all parsed values, with those of `add_options`.

    Raises:
        InputError: if a key, a value or the file is wrong.
    """
    parser = Parser(prog, description)
    parser.add_argument("--config", action="config", help="YAML file; options after it override its keys")
    add_options(parser)
    parser.add_class_arguments(Config)
    for option, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if option == "--config" or option.startswith("--config="):
            check_config_file(Path(option.partition("=")[2] or following))
    values = parser.read(argv)
    return Config(**{f.name: values[f.name] for f in dataclasses.fields(Config)}), values
