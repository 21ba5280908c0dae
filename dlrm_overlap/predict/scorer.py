"""Predicts by a checkpoint from the raw columns of a table.

A delta brings a `Scorer` up to date while threads use it: what it changes is copied, changed, and taken into use by one
assignment. A request reads this reference once, so its weights are all from before the delta, or all from after it.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dlrm_overlap.checkpoint.apply_deltas import apply, check_follows
from dlrm_overlap.checkpoint.delta_files import read_delta, state_of_checkpoint, state_of_delta
from dlrm_overlap.checkpoint.manifest import encoded_of, locate_checkpoint, read_manifest
from dlrm_overlap.checkpoint.storage import read_weights
from dlrm_overlap.config import InputError, ModelConfig, in_one_line
from dlrm_overlap.data.day import Ragged
from dlrm_overlap.data.encoding import Encoding
from dlrm_overlap.data.schema import Schema, table_keys
from dlrm_overlap.launching.parsing import section_of
from dlrm_overlap.predict.id_rows import IdRows
from dlrm_overlap.predict.plain_model import PlainDLRM, ids_in

if TYPE_CHECKING:
    import pyarrow as pa

_INTEGERS = (int, np.integer)
_NUMBERS = (*_INTEGERS, float, np.floating, np.bool_, Decimal)


class Scorer:
    """A trained model that predicts from raw values, as the columns of a table had them before `prepare`.

    It loads all tables into this process's memory, and needs PyTorch and pyarrow, but no TorchRec, FBGEMM or GPU.
    Threads may share it. Computes in float32, whatever `train.precision` was.

    Example:
        scorer = Scorer("runs/mine")  # its schema has price, site, genres and the label click
        scorer({"price": [9.5, 12.0], "site": ["a.org", None], "genres": [["drama"], []]})["click"]  # [2] float32
    """

    def __init__(self, checkpoint: str | Path) -> None:
        """Load a checkpoint, or a run's newest one.

        Raises:
            InputError: if it is damaged, its training samples were not made by `prepare table` or `prepare criteo`, or
                it has tables of any id and was trained by backend `torchrec`.
            ModuleNotFoundError: without pyarrow.
        """
        from dlrm_overlap.data.encoder import Encoder  # needs pyarrow

        self.path = locate_checkpoint(Path(checkpoint), "checkpoint")
        manifest, encoding = read_manifest(self.path), read_encoding_of(self.path)
        self.labels: list[str] = list(encoding.schema.labels)
        """names of the predicted labels"""
        self.columns: list[str] = encoding.schema.features
        """names of the columns that `__call__` needs"""
        self.schema, self.encoder = encoding.schema, Encoder(encoding.schema, encoding.keys)
        config = section_of(manifest.about.get("config", {}).get("model", {}), ModelConfig, self.path)
        self._manifest, self._config, self._updating = manifest, config, Lock()
        self._loaded = self._load(read_weights(self.path, manifest), state_of_checkpoint(manifest))

    def _load(self, weights: Mapping[str, torch.Tensor], state: dict[str, Any]) -> "_Loaded":
        ids = _ids_of(weights, self.schema, self.path)
        return _Loaded(state, weights, PlainDLRM(self._config, weights, len(self.schema.categorical)), ids)

    @property
    def step(self) -> int:
        """Step of the training whose weights are in use."""
        return self._loaded.state["step"]

    def apply(self, delta: str | Path) -> None:
        """Bring the weights in use up to date by a delta that follows them; other threads may score meanwhile.

        Needs memory for a copy of the tables that the delta changes, until no request uses the old ones.

        Raises:
            InputError: if the delta is missing, damaged or of another model, or does not follow; the weights in use
                are then unchanged.
        """
        path = Path(delta)
        with self._updating:
            loaded, found = self._loaded, read_delta(path)
            check_follows(path, found, self._manifest, loaded.state)
            changed = _Copies(loaded.weights)
            apply(path, found, changed)
            self._loaded = self._load({**loaded.weights, **changed.copies}, state_of_delta(found))

    def __call__(self, rows: "pa.Table | pa.RecordBatch | Mapping[str, Any]") -> dict[str, np.ndarray]:
        """Return the probability of each label, [n] float32, for n rows.

        `rows` is a table of pyarrow, or maps names of columns to n values each, which may be of several types; other
        columns are ignored. Raises an InputError if a column is missing, or a value is not what the schema says.
        """
        return self.score(_batch_of(rows, self.schema), 1)

    def score(self, block: "pa.RecordBatch", first_row: int) -> dict[str, np.ndarray]:
        """Return what `__call__` does; messages number rows from `first_row`."""
        loaded, bags = self._loaded, []  # once, since another thread may replace it
        dense, ids = self.encoder.features(first_row, block)
        for name, each, rows in zip(self.schema.categorical, ids, loaded.model.rows, strict=True):
            values, sizes = bags_of(each, None if name in loaded.ids else rows)
            if name in loaded.ids:
                keys = values.numpy()
                found, has_row = loaded.ids[name].rows_of(keys)
                self.encoder.count_ids(name, keys, has_row)
                values = torch.from_numpy(found)
            bags.append((values, sizes))
        logits = loaded.model(torch.from_numpy(dense), bags)
        probabilities = logits.sigmoid().numpy()
        return dict(zip(self.labels, np.ascontiguousarray(probabilities.T), strict=True))

    def rows_of(self, column: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of 64-bit ids [n] of a column of any id, and whether they are the ids' own, both [n]."""
        return self._loaded.ids[column].rows_of(ids)


def read_encoding_of(checkpoint: Path) -> Encoding:
    """Return the encoding in a checkpoint; an InputError if it has none, or a damaged one."""
    encoded = encoded_of(checkpoint)
    if encoded is None:
        raise InputError(
            f"checkpoint: {checkpoint} has no encoding, since its training samples were not made by `prepare table` "
            f"or `prepare criteo`, or by an earlier version; prepare the table, and train on it"
        )
    return encoded.read()


class _Loaded(NamedTuple):
    """Weights, and what was made of them; none of it ever changes."""

    state: dict[str, Any]
    """what a delta may follow, see `DeltaManifest.base`"""
    weights: Mapping[str, torch.Tensor]
    """by their names in a checkpoint"""
    model: PlainDLRM
    ids: Mapping[str, IdRows]
    """column of any id -> the rows of its ids"""


class _Copies(Mapping[str, torch.Tensor]):
    """Gives `weights`, each copied when it is first asked for."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self.copies: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.copies:
            self.copies[name] = self._weights[name].clone()
        return self.copies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _ids_of(weights: Mapping[str, torch.Tensor], schema: Schema, path: Path) -> dict[str, IdRows]:
    """Return column of any id -> its table's ids; an InputError if another map than ours has stored them."""
    keys, names = table_keys(len(schema.categorical)), ids_in(weights)
    found = {}
    for key, (column, described) in zip(keys, schema.categorical.items(), strict=True):
        if described.any:
            if names[key].replace("_hash_zch_identities", "_used_at") not in weights:
                raise InputError(
                    f"checkpoint: {path} was trained by backend torchrec, which stores the ids of the column {column} "
                    f"in another way; train with embedding.backend pgas or fused"
                )
            found[column] = IdRows(weights[names[key]].numpy())
    return found


def bags_of(ids: np.ndarray | Ragged, rows: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of all bags [n] int64, bag after bag, and the size of each bag [b] int64.

    Ids are folded into `rows` rows, as data.tables.max_rows does. With None, for a table of any id, they are the 64-bit
    keys.
    """
    if isinstance(ids, Ragged):
        values, lengths = ids.values[:], np.diff(ids.ends, prepend=0)
    else:
        values, lengths = ids[:, 0], np.ones(len(ids), np.int64)
    values = values if rows is None else values % rows
    return torch.from_numpy(values.astype(np.int64)), torch.from_numpy(lengths)


def _batch_of(rows: Any, schema: Schema) -> "pa.RecordBatch":
    import pyarrow as pa

    columns = schema.features
    is_table = isinstance(rows, (pa.Table, pa.RecordBatch))
    if not (is_table or hasattr(rows, "keys")):
        raise InputError(f"rows: a {type(rows).__name__}, not columns; give a dict that maps names to lists of values")
    names = list(rows.schema.names if is_table else rows)  # those of a DataFrame of pandas, too
    if twice := [name for name in columns if names.count(name) > 1]:
        raise InputError(f"column {twice[0]}: twice; leave one out")
    if missing := [name for name in columns if name not in names]:
        raise InputError(f"column {missing[0]}: missing; the model needs {', '.join(columns)}")
    arrays = []
    for name in columns:
        values, kind = rows[name], schema.categorical[name].type if name in schema.categorical else None
        array = values if isinstance(values, (pa.Array, pa.ChunkedArray)) else _array_of(values, name, kind)
        arrays.append(array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array)
    for name, array in zip(columns, arrays, strict=True):
        if len(array) != len(arrays[0]):
            sizes = f"{columns[0]} {len(arrays[0])}, {name} {len(array)}"
            raise InputError(f"rows: columns differ in length ({sizes}); give each one value a row")
    return pa.RecordBatch.from_arrays(arrays, names=columns)


def _array_of(values: Any, name: str, kind: str | None) -> "pa.Array":
    """Convert the values of a column, each as if it were alone; `kind` is a categorical column's type.

    Values without a common Arrow type become text. In a column of type string, so do decimals and numbers of several
    types, since Arrow would convert all to one type and so change texts: 7 to 7.0 if there is a 7.5, np.True_ to 1 if
    there is a 2, Decimal("7") to 7.00 if there is a Decimal("7.50"). Numbers mixed with dates are refused, since Arrow
    would make dates of them.
    """
    import pyarrow as pa

    try:
        if isinstance(values, (str, bytes, Mapping, set, frozenset)):  # a set has no order
            raise TypeError(f"a {type(values).__name__}")
        types = _numpy_types(values)
        if np.datetime64 in types and len(types) > 1:  # pyarrow 26 crashes
            raise TypeError(f"{', '.join(sorted(each.__name__ for each in types))} in one column")
        with suppress(pa.ArrowException, TypeError, OverflowError):  # integers from 2^63 on, values of several types
            array = pa.array(values, from_pandas=True)  # missing values may also be NaN, NaT and NA
            if kind != "string" or not _changes_texts(array.type, values):
                return array
        return pa.array([_as_text(value, kind == "hex") for value in values])
    except (pa.ArrowException, TypeError, ValueError) as error:
        cure = "give a list of numbers and texts, or of lists of them"
        raise InputError(f"column {name}: no column of values ({in_one_line(error):.200}); {cure}") from None


def _numpy_types(values: Any) -> set[type]:
    """Return the types of the NumPy scalars in a column, also of those in lists; takes less time than Arrow."""
    dtype = getattr(values, "dtype", None)
    if not (isinstance(values, (list, tuple)) or dtype == np.dtype("O")):
        return {dtype.type} if isinstance(dtype, np.dtype) else set()
    types = set(map(type, values))
    found = {each for each in types if issubclass(each, np.generic)}
    if any(issubclass(each, np.ndarray) for each in types):
        found.update(*(_numpy_types(each) for each in values if isinstance(each, np.ndarray)))
    if any(issubclass(each, (list, tuple)) for each in types):
        found |= _numpy_types([*chain.from_iterable(each for each in values if isinstance(each, (list, tuple)))])
    return found


def _changes_texts(kind: Any, values: Any) -> bool:
    """Return whether a column of Arrow's type `kind` may have other texts than its values alone."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_list(kind) else kind
    if pa.types.is_string(kind):
        return False
    is_time = pa.types.is_date(kind) or pa.types.is_time(kind) or pa.types.is_timestamp(kind)
    return pa.types.is_decimal(kind) or len(_types_of_numbers(values)) > (0 if is_time else 1)


def _types_of_numbers(values: Any) -> set[type]:
    if isinstance(values, np.ndarray) and values.dtype != object:
        return {values.dtype.type} if issubclass(values.dtype.type, _NUMBERS) else set()
    of_lists = (_types_of_numbers(each) for each in values if isinstance(each, (list, tuple, np.ndarray)))
    numbers = {type(each) for each in values if isinstance(each, _NUMBERS) and each == each}  # no NaN
    return numbers.union(*of_lists)


def _as_text(value: Any, is_hex: bool) -> Any:
    """Return a value, or the elements of a list, as Python prints them, but integers in hexadecimal if `is_hex`.

    Missing values are None.
    """
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_as_text(element, is_hex) for element in value]
    if value is None or value != value:  # NaN
        return None
    if isinstance(value, (str, bytes)):
        return value
    if is_hex and isinstance(value, _INTEGERS):
        is_negative = -(1 << 63) <= value < 0  # and has the key of value + 2^64
        return f"{int(value) + (is_negative << 64):#x}"
    if isinstance(value, Decimal) and not is_hex:
        return f"{value:f}"
    if isinstance(value, (bool, int, float, np.generic)):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not a number or a text")
