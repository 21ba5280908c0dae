"""Reading the configuration: a YAML file, then dotted options. Every mistake is reported in one line."""

import contextlib
import dataclasses
import difflib
import os
import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from dlrm_overlap.config import Config, InputError, flatten, in_one_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Sections = TypeVar("Sections", bound="DataclassInstance")
_CONFIGS = Path(__file__).parents[1] / "configs"


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Drop the rest of the output where the reader of standard output leaves early, as `head` does."""
    try:
        yield
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered


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


def find_config(given: str) -> Path:
    """Return the path of the YAML file `given`, or of the package's own of that name: quickstart, bench/tiny.

    A file that is there comes first. The path in a checkout, configs/quickstart.yaml, names the package's file too.
    """
    own = _CONFIGS / f"{given.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    return own if os.path.isfile(own) and not os.path.exists(given) else Path(given)


def check_config_file(path: Path, config: type = Config) -> None:
    """Check that `path` is YAML with keys of the dataclass `config`, each written once.

    Raises:
        InputError: naming the file, the key and the nearest known key.
    """
    try:
        with path.open() as file:
            tree = yaml.load(file, UniqueKeyLoader)
    except OSError as error:
        names = sorted(str(own.relative_to(_CONFIGS).with_suffix("")) for own in _CONFIGS.rglob("*.yaml"))
        cure = f"give an existing YAML file, or the name of one of ours: {suggest(path.stem, names)}"
        raise InputError(f"--config: {path}: {error.strerror}; {cure}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"--config: {path} is not YAML in UTF-8: {in_one_line(error)}; correct it") from None
    except RecursionError:
        raise InputError(f"--config: {path} is nested too deeply; sections hold keys") from None
    if tree is None:
        raise InputError(f"--config: {path} holds no key; write some into it, or leave --config out")
    check_keys(tree, config, "", path)


def check_keys(tree: Any, section: type, prefix: str, path: Path) -> None:
    """Check that `tree`, read from `path`, is a section with keys of the dataclass `section`.

    Raises:
        InputError: naming `path`, the key after `prefix`, and the nearest known key.
    """
    if tree is None:
        raise InputError(f"{path}: {prefix.rstrip('.')} holds no key; write some below it, or leave it out")
    if not isinstance(tree, dict):
        raise InputError(
            f"{path}: {prefix.rstrip('.') or 'the file'} must be a section of keys, not {tree!r}; indent them below it"
        )
    fields = {f.name: f.type for f in dataclasses.fields(section)}
    for key, value in tree.items():
        if key not in fields:
            section_name, _, rest = str(key).partition(".")
            if rest and section_name in fields:  # as on the command line
                cure = f"write {rest} below a line `{section_name}:`, indented"
            else:
                cure = suggest(f"{prefix}{key}", [prefix + f for f in fields])
            raise InputError(f"{path}: {prefix}{key} is not a key; {cure}")
        nested = fields[key]
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            check_keys(value, nested, f"{prefix}{key}.", path)


def suggest(name: str, known: Sequence[str]) -> str:
    """Return "did you mean X?" with the nearest of `known`, or a list of them where none is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def positionals_first(argv: Sequence[str]) -> list[str]:
    """Return `argv` with its options, each with its value, at the end.

    argparse drops an optional positional that comes after an option.
    """
    first, options, each = [], [], iter(argv)
    for argument in each:
        if not argument.startswith("-"):
            first.append(argument)
            continue
        options.append(argument)
        if "=" not in argument and (value := next(each, None)) is not None:
            options.append(value)
    return [*first, *options]


def suggest_option(name: str, known: Sequence[str]) -> str:
    """Return "did you mean X or Y?" with the options `known` that `name` may stand for.

    These are options with the last part of `name` (for `--lr`: `--embedding.lr` and `--train.lr`), else the option
    nearest to the whole name, else options whose last part is nearest to that of `name`.
    """
    name = "--" + name.lstrip("-").replace("-", "_")
    tails = [option.lstrip("-").rpartition(".")[2] for option in known]
    wanted = name.lstrip("-").rpartition(".")[2]
    found = [option for option, tail in zip(known, tails, strict=True) if tail == wanted]
    found = found or difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if not found:
        near = difflib.get_close_matches(wanted, tails, n=1, cutoff=0.7)
        found = [option for option, tail in zip(known, tails, strict=True) if tail in near]
    return f"did you mean {' or '.join(found)}?" if found else "--help tells the options"


_KINDS = {
    "PositiveInt": "a whole number above 0",
    "NonNegativeInt": "a whole number from 0 on",
    "PositiveFloat": "a number above 0",
    "NonNegativeFloat": "a number from 0 on",
    "PositiveFinite": "a finite number above 0",
    "NonNegativeFinite": "a finite number from 0 on",
    "int": "a whole number",
    "bool": "true or false",
    "str": "text",
    "list": "a list, as in '[64, 16]'",
    "NoneType": "null",
}


def _in_words(kinds: str) -> str:
    """Turn jsonargparse's names of types, separated by commas, into words, such as "a whole number above 0 or null"."""
    kinds = re.sub(r"<class '([\w.]+)'>", r"\1", kinds)
    kinds = re.sub(r"jsonargparse\.typing\.|typing\.", "", kinds)
    kinds = re.sub(r"list\[.*\]", "a list of such", kinds)
    kinds = re.sub(r"Literal\[([^]]*,[^]]*)\]", r"one of \1", kinds)
    kinds = re.sub(r"Literal\[([^]]*)\]", r"\1", kinds)
    if kinds.startswith("one of"):
        return kinds
    *words, last = [_KINDS.get(kind, kind) for kind in kinds.split(", ")]
    return f"{', '.join(words)} or {last}" if words else last


def _no_option(word: str, options: Sequence[str]) -> str:
    """Return the message for a `word` without dashes that stands where one of `options` must."""
    if f"--{word.partition('=')[0]}" in options:
        cure = f"did you mean --{word}?"
    elif "--config" in options and word.endswith((".yaml", ".yml")):
        cure = f"did you mean --config {word}?"
    else:
        cure = "see --help"
    return f"{word}: not an option, since it does not begin with --; {cure}"


def _parse_error(message: str, options: Sequence[str]) -> str:
    """Turn jsonargparse's message, which may run over many lines, into one line of key, value and rule."""
    if unknown := re.match(r"[Uu]nrecognized arguments: (([^\s=]+)\S*)", message):
        if not unknown[1].startswith("-"):
            return _no_option(unknown[1], options)
        return f"{unknown[2]} is not an option; {suggest_option(unknown[2], options)}"
    found = re.match(r'Parser key "([^"]+)"(?: element \d+)?:\s*(.*)', message, re.DOTALL)
    if not found:
        return in_one_line(message) + "; see --help"
    key, rule = found[1], found[2]
    if "." not in key and f"--{key}" in options:  # an option of the command, not a key of the configuration
        key = f"--{key}"
    for pattern in (
        r"Subtypes: \[(?P<kinds>.*?)\]\n.*Given value:(?P<value>.*)",
        r"Not of type (?P<kinds>\w+): (?P<value>.*) does not conform to restriction",
        r"Not of type (?P<kinds>\w+): .*: '(?P<value>.*)'",
        r"Expected a (?P<kinds>.*)\. Got value:(?P<value>.*)",
    ):
        if parts := re.search(pattern, rule, re.DOTALL):
            value = in_one_line(parts["value"]) or "''"
            return f"{key}: {value} is not {_in_words(parts['kinds'])}; see --help"
    return f"{key}: {in_one_line(rule)}; see --help"


def _check_nulls(values: Any, section: type, prefix: str) -> None:
    """Check that no key of the dataclass `section` is null that cannot be, which jsonargparse lets pass in a file.

    Raises:
        InputError: naming the key after `prefix`.
    """
    for each in dataclasses.fields(section):
        value, key = values[each.name], prefix + each.name
        if isinstance(each.type, type) and dataclasses.is_dataclass(each.type):
            _check_nulls(value, each.type, f"{key}.")
        elif value is None and NoneType not in get_args(each.type):
            raise InputError(f"{key}: null, or left empty, is no value of it; give one, or leave the key out")


class Parser(ArgumentParser):
    """An argument parser that reports a mistake in one line."""

    def __init__(self, prog: str, description: str, usage: str | None = None) -> None:
        super().__init__(prog=prog, description=description, usage=usage, allow_abbrev=False, exit_on_error=False)

        self.help_texts: dict[str, tuple[str, str]] = {}
        """option -> in --help, a name for its value, and its meaning"""
        self.shown: Callable[[str], bool] = lambda option: True
        """whether --help shows an option"""

    def read(self, argv: Sequence[str], config: type | None = None) -> Any:
        """Return the values of `argv`, each section as its dataclass; `config` is the dataclass of all sections.

        Raises:
            InputError: if an option is unknown or its value wrong.
        """
        try:
            values = self.parse_args(list(argv))
            if config is not None:
                _check_nulls(values, config, "")
            return self.instantiate(values)
        except ArgumentError as error:
            if missing := re.search(r"arguments are required: (.*)", str(error)):
                names = [self._shown_name(name) for name in missing[1].split(", ")]
                raise InputError(f"missing on the command line: {', '.join(names)}; see --help") from None
            raise InputError(_parse_error(str(error), self._options())) from None

    def _shown_name(self, name: str) -> str:
        """Return the name of the positional argument `name` in --help."""
        action = next((action for action in self._actions if action.dest == name), None)
        if action is None:
            return name
        return str(action.metavar or "|".join(map(str, action.choices or [name])))

    def take_defaults(self, values: Mapping[str, Any]) -> None:
        """Replace the defaults by `values`, nested as in a file.

        Raises:
            InputError: if one is of a wrong type.
        """
        try:
            self.parse_object(dict(values))
        except ArgumentError as error:
            raise InputError(_parse_error(str(error), self._options())) from None
        self.set_defaults(flatten(values))

    def print_help(self, file: Any = None) -> None:
        """Print the text of --help."""
        for action in self._actions:
            for option in self.help_texts.keys() & set(action.option_strings):
                action.metavar, action.help = self.help_texts[option]
            if action.option_strings and not any(map(self.shown, action.option_strings)):
                action.help = SUPPRESS
        with reader_may_leave():
            super().print_help(file)

    def _options(self) -> list[str]:
        """Return all options but those that read a whole section (`--train FILE`)."""
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        sections = {option.rpartition(".")[0] for option in options}
        return [option for option in options if option not in sections and not option.endswith("+")]


def _choose_help(parser: Parser, config: type, argv: Sequence[str]) -> None:
    """Have `parser`, which has no keys yet, show the keys that `--help` or `--help SECTION` in `argv` asks for.

    Raises:
        InputError: if that is no section of the dataclass `config`.
    """
    common = getattr(config, "common", ())
    asked = next((i for i, option in enumerate(argv) if option in ("-h", "--help")), None)
    if not common or asked is None:
        return
    sections = [each.name for each in dataclasses.fields(config)]
    own = {option for action in parser._actions for option in action.option_strings}
    topic = next((word for word in argv[asked + 1 : asked + 2] if not word.startswith("-")), None)
    if topic is None:
        parser.shown = lambda option: option in (*own, *parser.help_texts, *(f"--{key}" for key in common))
        names = f"{', '.join(sections[:-1])} or {sections[-1]}"
        text = "show these options, among them the keys that are set most often; --help SECTION shows all keys of"
        parser.help_texts["--help"] = ("", f"{text} {names}, --help all every key")
    elif topic in sections:
        parser.shown = lambda option: option in (*own, *parser.help_texts) or option.startswith(f"--{topic}.")
    elif topic != "all":
        raise InputError(f"--help {topic}: not a section; {suggest(topic, [*sections, 'all'])}")


def parse_config(
    prog: str,
    description: str,
    argv: Sequence[str],
    add_options: Callable[[Parser], None],
    defaults: Mapping[str, Any] | None = None,
) -> tuple[Config, Any]:
    """Return the configuration that `argv` describes, and all parsed values, among them those of `add_options`.

    `defaults` replace the keys' own; they are nested as in a file, and their keys are known.

    Raises:
        InputError: if a key, a value or the file is wrong.
    """
    return parse_sections(Config, prog, description, argv, add_options, defaults)


def parse_sections(
    config: type[Sections],
    prog: str,
    description: str,
    argv: Sequence[str],
    add_options: Callable[[Parser], None],
    defaults: Mapping[str, Any] | None = None,
) -> tuple[Sections, Any]:
    """Return what `parse_config` does, for another dataclass of sections than a run's.

    Raises:
        InputError: if a key, a value or the file is wrong.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)  # --help shows the docstring of each key
    parser = Parser(prog, description, usage=f"{prog} [--config FILE] [--section.key VALUE ...]")
    parser.add_argument(
        "--config", action="config", help="YAML file, or a name such as quickstart; options after it override its keys"
    )
    add_options(parser)
    _choose_help(parser, config, argv)
    parser.add_class_arguments(config)
    if defaults:
        parser.take_defaults(defaults)
    argv = [part for each in argv for part in (each.split("=", 1) if each.startswith("--config=") else [each])]
    for index, option in enumerate(argv):
        if option == "--config":
            given = next(iter(argv[index + 1 :]), "")
            if not given or given.startswith("--"):
                raise InputError("--config: no file is named; give a YAML file, or a name such as quickstart")
            path = find_config(given)
            check_config_file(path, config)
            argv[index + 1] = str(path)
    values = parser.read(argv, config)
    return config(**{f.name: values[f.name] for f in dataclasses.fields(config)}), values
