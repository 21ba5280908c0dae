"""The columns of a table of samples: which are labels, dense or categorical features, and the time; a YAML file.

docs/configuration.md has an example.
Features are taken in the order of the file, which is that of the tables `t_00`, `t_01`, ..
"""

import datetime
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from dlrm_overlap.config import CRITEO_DENSE, CRITEO_TABLES, InputError, NonNegativeFloat, PositiveInt, in_one_line
from dlrm_overlap.launching.parsing import UniqueKeyLoader, read_tree


@dataclass(frozen=True)
class Label:
    """A column of labels, each a task of the model."""

    weight: NonNegativeFloat = 1.0
    """factor of its loss in the sum over all labels"""
    above: float | None = None
    """labels are 1 where the number is above this one, else 0; null takes columns of 0 and 1"""


@dataclass(frozen=True)
class Dense:
    """A column of numbers. A missing one is 0, after the transform."""

    transform: Literal["none", "log1p", "standardised"] = "none"
    """log1p: log(1 + x), of negative numbers 0, as for Criteo; standardised: (x - mean) / standard deviation, which
    `prepare` learns"""


@dataclass(frozen=True)
class Categorical:
    """A column of values, or of lists of them: a feature with a table of its own."""

    type: Literal["string", "int", "hex"] = "string"
    """string: known by the 64-bit BLAKE2b hash of its bytes; int and hex: numbers, or text of decimal and hexadecimal
    ones"""
    rows: PositiveInt | None = None
    """hash values into so many rows, of which row 0 is for missing ones"""
    min_count: PositiveInt | None = None
    """instead: learn a vocabulary by `prepare`, with a row for each value that is seen so often"""
    list: bool | str = False
    """a list of values; in text, what separates them"""
    longest: PositiveInt | None = None
    """ids of a list that are taken, the first ones; null takes all"""
    size: PositiveInt | None = None
    """values of each list, if all have as many: then records need no sizes of bags, and a GPU unpacks them"""


@dataclass(frozen=True)
class Time:
    """The column by which the samples to evaluate on are held out."""

    column: str
    held_out_from: Any
    """number, date or text: samples of that time or later are held out"""


@dataclass(frozen=True)
class Schema:
    """The columns of a table, and how files hold them."""

    labels: Mapping[str, Label] = field(default_factory=dict)
    dense: Mapping[str, Dense] = field(default_factory=dict)
    categorical: Mapping[str, Categorical] = field(default_factory=dict)
    time: Time | None = None
    delimiter: str = ","
    """text: what separates fields, one character"""
    columns: list[str] | None = None
    """text without a header: the names of all columns"""
    missing: list[str] = field(default_factory=lambda: [""])
    """text: fields that stand for a missing value"""

    def __post_init__(self) -> None:
        for name, column in self.categorical.items():
            if (column.rows is None) == (column.min_count is None):
                raise InputError(
                    f"categorical.{name}: rows {column.rows}, min_count {column.min_count}; give one of them, to hash "
                    f"values or to learn a vocabulary"
                )
            if column.rows is not None and column.rows >= 2**31:
                raise InputError(
                    f"categorical.{name}.rows: {column.rows} must be below {2**31}, so that ids fit in int32"
                )
            for key, value in (("longest", column.longest), ("size", column.size)):
                if value is not None and not column.list:
                    raise InputError(f"categorical.{name}.{key}: {value} is of lists; set list")
        for section in ("labels", "categorical"):
            if not getattr(self, section):
                raise InputError(f"{section}: none, but a model needs one; name its columns")
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise InputError(f"{twice}: a column with two uses; write it twice into the table, under two names")
        if len(self.delimiter.encode()) != 1:
            raise InputError(f"delimiter: {self.delimiter!r} is not one character; take ',' or \"\\t\"")

    @property
    def names(self) -> list[str]:
        """The columns that are read."""
        return [*self.labels, *self.dense, *self.categorical, *([self.time.column] if self.time else [])]

    @property
    def counted(self) -> list[str]:
        """The columns with a vocabulary, which `prepare` learns."""
        return [name for name, column in self.categorical.items() if column.min_count]

    @property
    def standardised(self) -> list[str]:
        """The columns whose mean and standard deviation `prepare` learns."""
        return [name for name, column in self.dense.items() if column.transform == "standardised"]

    @property
    def learns(self) -> bool:
        """Whether `prepare` reads all values once before it writes any."""
        return bool(self.counted or self.standardised)

    def as_dict(self) -> dict[str, Any]:
        """Return the keys and their values as JSON has them."""
        found = asdict(self)
        if self.time is not None and isinstance(self.time.held_out_from, datetime.date):
            found["time"]["held_out_from"] = self.time.held_out_from.isoformat()
        return found


def read_schema(path: Path) -> Schema:
    """Return the schema that the YAML file `path` describes.

    Raises:
        InputError: naming the file, the key and the rule that it breaks.
    """
    try:
        with path.open() as file:
            tree = yaml.load(file, UniqueKeyLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path}: no schema can be read ({in_one_line(error)}); give a YAML file") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: not a section of keys; it needs labels, dense and categorical")
    time = tree.get("time")
    if time is not None and (not isinstance(time, dict) or sorted(time) != ["column", "held_out_from"]):
        raise InputError(f"{path}: time: {time!r} must have the keys column and held_out_from, and no others")
    keys = read_tree({key: value for key, value in tree.items() if key != "time"}, Schema, path)
    try:
        return Schema(**keys, time=Time(**time) if time else None)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def criteo_schema(rows: list[int] | None, min_count: int | None = None) -> Schema:
    """Return the schema of Criteo's click logs as text: a label, 13 counts and 26 hexadecimal numbers between tabs.

    `rows` are those of each table to hash into; without it, vocabularies are learnt with `min_count`.
    """
    dense, tables = [f"I{i + 1}" for i in range(CRITEO_DENSE)], [f"C{t + 1}" for t in range(CRITEO_TABLES)]
    columns = [Categorical("hex", rows[t] if rows else None, min_count) for t in range(CRITEO_TABLES)]
    return Schema(
        delimiter="\t",
        columns=["label", *dense, *tables],
        labels={"label": Label()},
        dense=dict.fromkeys(dense, Dense("log1p")),
        categorical=dict(zip(tables, columns, strict=True)),
    )
