"""A schema: a YAML file that says what the columns of a table are (docs/configuration.md).

The categorical features are the tables `t_00`, `t_01`, .. in the file's order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import yaml

from dlrm_overlap.config import (
    CRITEO_DENSE,
    CRITEO_TABLES,
    InputError,
    NonNegativeFloat,
    PositiveInt,
    ValueRule,
    in_one_line,
)
from dlrm_overlap.launching.parsing import NOT_YAML, UniqueKeyLoader, read_tree

Separator = Annotated[str, ValueRule("the text between two values", bool)]
MISSING_ID = -(1 << 63)
"""the id of a missing value in a table of any id; an integer of this value, or of 2^63, has the same id"""
Delimiter = Annotated[str, ValueRule("one ASCII character", lambda value: len(value) == 1 and value.isascii())]


def table_keys(tables: int) -> list[str]:
    """Return the names of `tables` tables, `t_00`, `t_01`, .., in the model's order."""
    width = max(2, len(str(tables - 1)))
    return [f"t_{t:0{width}}" for t in range(tables)]


@dataclass(frozen=True)
class Label:
    weight: NonNegativeFloat = 1.0
    """weight of its loss in the sum over all labels"""


@dataclass(frozen=True)
class Dense:
    """A column of numbers. A missing number becomes 0 after the transform."""

    transform: Literal["none", "log1p"] = "none"
    """log1p: log(1 + max(x, 0)), as for Criteo's counts, whose negative numbers become 0"""


@dataclass(frozen=True)
class Categorical:
    type: Literal["string", "int", "hex"] = "string"
    """int and hex: 64-bit integers, or decimal or hexadecimal text"""
    rows: PositiveInt | None = None
    """hash values into this number of rows; row 0 is for missing values"""
    min_count: PositiveInt | None = None
    """or learn a vocabulary with a row for each value that occurs this often"""
    any: bool = False
    """or keep the 64-bit key itself as the id; the number of rows is unknown: a table of any id"""
    list: bool | Separator = False
    """whether cells are lists; for text, the separator"""


@dataclass(frozen=True)
class Schema:
    labels: Mapping[str, Label] = field(default_factory=dict)
    dense: Mapping[str, Dense] = field(default_factory=dict)
    categorical: Mapping[str, Categorical] = field(default_factory=dict)
    time: str | None = None
    """column of the samples' times: timestamps, dates, text in ISO 8601, or Unix times in `time_unit`"""
    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    delimiter: Delimiter = ","
    """text: the separator of fields"""
    columns: list[str] | None = None
    """text without a header: the names of all columns"""
    missing: list[str] = field(default_factory=lambda: [""])
    """texts and numbers that mean a missing value, in addition to null and NaN"""

    def __post_init__(self) -> None:
        for name, column in self.categorical.items():
            if [column.rows is not None, column.min_count is not None, column.any].count(True) != 1:
                raise InputError(
                    f"categorical.{name}: rows {column.rows}, min_count {column.min_count}, any {column.any}; give one "
                    f"of them: rows, to hash values, min_count, to learn a vocabulary, or any: true, to keep 64-bit ids"
                )
        for section in ("labels", "categorical"):
            if not getattr(self, section):
                raise InputError(f"{section}: none, but a model needs one; name its columns")
        if twice := [name for name in self.names if self.names.count(name) > 1]:
            raise InputError(f"{twice[0]}: a column with two uses; write it twice into the table, under two names")
        if self.columns is not None:
            for name in self.read:
                if (number := self.columns.count(name)) != 1:
                    what = "twice" if number else "missing"
                    raise InputError(f"columns: {name} is {what}; name every column of the file, in its order")

    @property
    def features(self) -> list[str]:
        return [*self.dense, *self.categorical]

    @property
    def names(self) -> list[str]:
        return [*self.labels, *self.features]

    @property
    def read(self) -> list[str]:
        """Names of all columns to read; the time may also be a feature."""
        return list(dict.fromkeys([*self.names, *([self.time] if self.time else [])]))


def read_schema(path: Path) -> Schema:
    """Return the schema in a YAML file; an InputError names the file, the key and the rule that it breaks."""
    try:
        with path.open("rb") as file:  # UTF-8 under every locale
            tree = yaml.load(file, UniqueKeyLoader)
    except InputError:
        raise
    except (OSError, *NOT_YAML) as error:
        raise InputError(f"{path}: no schema can be read ({in_one_line(error)}); give a YAML file") from None
    keys = read_tree(tree, Schema, path)
    try:
        return Schema(**keys)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def criteo_schema(rows: int | None, min_count: int | None = None) -> Schema:
    """Return the schema of Criteo's click logs: a label, 13 counts and 26 hexadecimal numbers, separated by tabs."""
    dense, tables = [f"I{i + 1}" for i in range(CRITEO_DENSE)], [f"C{t + 1}" for t in range(CRITEO_TABLES)]
    return Schema(
        delimiter="\t",
        columns=["label", *dense, *tables],
        labels={"label": Label()},
        dense=dict.fromkeys(dense, Dense("log1p")),
        categorical=dict.fromkeys(tables, Categorical("hex", rows, min_count)),
    )
