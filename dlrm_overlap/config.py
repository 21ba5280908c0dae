"""The configuration: one frozen dataclass per section, which checks its values when it is built.

Every key may be set in a YAML file (`--config`) or on the command line (`--train.steps 40`). The string below a field
is its help text, in `--help` and in docs/configuration.md. A bad value raises `InputError`, whose one line names value,
rule and cure.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from dlrm_overlap.backends import BACKENDS


class ValueRule(NamedTuple):
    """A rule for a key's value, in addition to its type."""

    words: str
    """completes the message: a value is not .."""
    holds: Callable[[Any], bool]


# Kernels and seeds take 32 bits.
PositiveInt = Annotated[int, ValueRule("a whole number from 1 to 2^31 - 1", lambda value: 0 < value < 2**31)]
NonNegativeInt = Annotated[int, ValueRule("a whole number from 0 to 2^31 - 1", lambda value: 0 <= value < 2**31)]
# Optimizers and losses compute with these values, and small multiples of them, in 32-bit floating point.
PositiveFloat = Annotated[float, ValueRule("a number from 1e-37 to 1e37", lambda value: 1e-37 <= value <= 1e37)]
NonNegativeFloat = Annotated[float, ValueRule("a number from 0 to 1e37", lambda value: 0 <= value <= 1e37)]
BelowOne = Annotated[float, ValueRule("a number from 0 to below 1", lambda value: 0 <= value < 1)]
Share = Annotated[float, ValueRule("a number above 0, up to 1", lambda value: 0 < value <= 1)]
Seconds = Annotated[float, ValueRule("a number of seconds from 0.1 to 86400", lambda value: 0.1 <= value <= 86400)]
# Sums of the weights fit 32 bits.
HalfLife = Annotated[int, ValueRule("a whole number from 0 to 100", lambda value: 0 <= value <= 100)]
# Limited by what a pipe holds.
Prefetch = Annotated[int, ValueRule("a whole number from 1 to 128", lambda value: 0 < value <= 128)]
Workers = Annotated[int, ValueRule("a whole number from 0 to 256", lambda value: 0 <= value <= 256)]
SliceBags = Annotated[int, ValueRule("a power of two from 4 on", lambda value: value >= 4 and value.bit_count() == 1)]
# FBGEMM requires a multiple of 4.
Dim = Annotated[int, ValueRule("a multiple of 4 above 0", lambda value: value > 0 and value % 4 == 0)]
# Linux takes paths of 4095 bytes; a run creates files below the path that it is given.
_NAME_BYTES, _PATH_BYTES = 255, 2048
_VARIABLE = re.compile(r"\$[A-Za-z_{]")


def _is_path(value: str) -> bool:
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        return False
    return (
        value[:1] != "~"
        and "\0" not in value
        and len(encoded) <= _PATH_BYTES
        and max(map(len, encoded.split(b"/"))) <= _NAME_BYTES
    )


FullPath = Annotated[
    str,
    ValueRule(
        f"a path written in full, without ~ and $NAME (in files no shell replaces them, nor ~ after =), of at most "
        f"{_PATH_BYTES} bytes of UTF-8, {_NAME_BYTES} per name",
        lambda value: _is_path(value) and not _VARIABLE.search(value),
    ),
]
FolderName = Annotated[
    str,
    ValueRule(
        f"the name of one folder, of at most {_NAME_BYTES} bytes, which the run makes in log.dir",
        lambda value: value not in ("", ".", "..") and "/" not in value and value.isprintable() and _is_path(value),
    ),
]


def _is_time(value: str) -> bool:
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


Time = Annotated[
    str, ValueRule("a time such as 2026-11-20 or 2026-11-20T18:00+01:00; the zone is UTC if none is given", _is_time)
]
TableOptimizer = Literal[
    "sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb"
]
Memory = Literal["gpu", "cached", "auto"]
IdKind = Literal["rows", "any", "hashed"]
AUTO = "auto"
BACKEND_NAMES = (AUTO, *BACKENDS)
BackendName = Annotated[str, ValueRule(f"one of {', '.join(map(repr, BACKEND_NAMES))}", BACKEND_NAMES.__contains__)]

CRITEO_DENSE, CRITEO_TABLES = 13, 26
EVAL_FRACTION = 0.25  # of data.eval_fraction: null
SELECTION = ("eval_path", "eval_from", "eval_fraction")
"""keys of data, of which at most one selects the samples to evaluate"""
# Batches that loader processes keep in addition to those read ahead, as copies of them to the GPU may be in flight.
HELD_BATCHES = 3
_MAX_HOT = 100_000
_RANGE = re.compile(r"([0-9]{1,18})(?:\.\.([0-9]{1,18}))?")


class InputError(ValueError):
    """A user's mistake, in one line: value, rule, cure. The command line prints it and exits with code 2."""

    cure = ""
    """what the command line adds, if the line has no cure"""


class PeerError(RuntimeError):
    """Another rank has failed. The one-line message names the rank and its error."""


def in_one_line(error: BaseException | str) -> str:
    return " ".join(str(error).split())


@dataclass(frozen=True)
class TablesConfig:
    """The embedding tables. A single value applies to every table, a list has one value per table."""

    count: PositiveInt | None = None
    """synthetic: number of tables; null takes the length of the lists"""
    rows: PositiveInt | list[PositiveInt] | None = None
    """rows per table; null for prepared samples, whose files give them. synthetic, ids any or hashed: number of ids in
    use at a time"""
    max_rows: PositiveInt | None = None
    """upper limit of every table's rows; Criteo's ids are taken modulo this"""
    multi_hot: PositiveInt | str | list[PositiveInt | str] = 1
    """synthetic: ids per bag, a number such as 3, or '0..8' for a uniform range, where 0 gives empty bags"""
    zipf_alpha: NonNegativeFloat | list[NonNegativeFloat] = 1.05
    """skew of the synthetic ids, P(k-th row) ~ 1/k^alpha; 0 is uniform"""
    ids: IdKind | list[IdKind] = "rows"
    """synthetic: what the ids of a table are. rows: numbers of its rows. any: 64-bit integers, which get their rows in
    training (embedding.id_tables). hashed: the same integers, each reduced to one of hashed_rows rows by a hash, as
    `rows` in a schema does; ids may share a row. For prepared samples the files say it"""
    hashed_rows: PositiveInt | list[PositiveInt] | None = None
    """synthetic, ids hashed: rows of such tables; row 0 stays unused. A list has a value for every table"""
    half_life: HalfLife | list[HalfLife] = 0
    """synthetic: number of positions after which an id of a history counts half as much for the label, newest id first;
    0 weights all ids of a bag equally"""
    drift: NonNegativeInt = 0
    """synthetic, tables with ids any or hashed: number of samples after which half of the ids in use have been replaced
    by new ones, one after the other; 0 keeps the ids. Evaluation samples have the ids of the first samples of training,
    so judge a run by the metrics of its training samples"""

    def __post_init__(self) -> None:
        for spec in self.multi_hot if isinstance(self.multi_hot, list) else [self.multi_hot]:
            parse_multi_hot(spec)
        lengths = {len(value) for value in self._per_table if isinstance(value, list)}
        if len(lengths | ({self.count} if lengths and self.count else set())) > 1:
            raise InputError(
                f"data.tables: count {self.count}, lists of {sorted(lengths)} values; count, rows, multi_hot, "
                f"zipf_alpha, ids, hashed_rows and half_life must agree on the number of tables"
            )
        if self.drift and not self.has_wide_ids:
            raise InputError(
                f"data.tables.drift: {self.drift}, but no table takes any id; set data.tables.ids any or hashed, or "
                f"leave drift out"
            )
        if ("hashed" in self._kinds) != (self.hashed_rows is not None):
            raise InputError(
                f"data.tables.hashed_rows: {self.hashed_rows}, data.tables.ids {self.ids}; give hashed_rows with ids "
                f"hashed, and with no other"
            )

    @property
    def _per_table(self) -> tuple[Any, ...]:
        return self.rows, self.multi_hot, self.zipf_alpha, self.ids, self.hashed_rows, self.half_life

    @property
    def _kinds(self) -> set[str]:
        return set(self.ids) if isinstance(self.ids, list) else {self.ids}

    @property
    def has_wide_ids(self) -> bool:
        """Whether the ids of some synthetic table are 64-bit integers, any or hashed."""
        return bool(self._kinds - {"rows"})

    @property
    def synthetic_rows(self) -> list[int]:
        """The rows of each synthetic table; if its ids are any or hashed, the number of ids in use at a time."""
        assert self.rows is not None, "DataConfig checks that synthetic tables have rows"
        given = self.rows if isinstance(self.rows, list) else [self.rows] * self.number()
        return [min(rows, self.max_rows or rows) for rows in given]

    def number(self, default: int | None = None) -> int:
        """Return the number of tables, or `default` if no key gives it.

        Raises:
            InputError: if neither gives the number.
        """
        for value in self._per_table:
            if isinstance(value, list):
                return len(value)
        if (number := self.count or default) is None:
            raise InputError(
                "data.tables.count: null, and no list gives the number of tables; set data.tables.count, or start from "
                "a file, as in --config quickstart"
            )
        return number


@dataclass(frozen=True)
class DataConfig:
    """Where the samples come from."""

    kind: Literal["synthetic", "prepared", "criteo_npy", "criteo_multihot"] = "synthetic"
    """synthetic, prepared (files written by `prepare`), criteo_npy (TorchRec's day files) or criteo_multihot (MLPerf's
    npz)"""
    path: FullPath | None = None
    """file or folder of the samples; required by every kind except synthetic"""
    eval_path: FullPath | None = None
    """files: file or folder of the evaluation samples; null holds out the last eval_fraction of path"""
    eval_fraction: BelowOne | None = None
    """files: fraction of path's samples, at its end, that is held out for evaluation; null is 0.25 or, if `prepare
    samples` wrote them, what it held out. Excludes eval_path and eval_from"""
    eval_from: Time | None = None
    """prepared samples with times: hold out the samples from this time on, instead of eval_fraction"""
    eval_window: Literal["hour", "day", "week"] | None = None
    """samples with times: also give the metrics of each hour, day or week of the evaluation samples"""
    train_from: NonNegativeInt | Time = 0
    """files: number of the first training sample or, if samples have times, its time"""
    shuffle: NonNegativeInt = 0
    """files: number of successive training samples that are shuffled together, by seed and differently in each pass; 0
    keeps the files' order"""
    eval_samples: PositiveInt = 65536
    """synthetic: number of samples per evaluation"""
    dense_features: PositiveInt = CRITEO_DENSE
    """synthetic: dense features per sample"""
    tables: TablesConfig = field(default_factory=TablesConfig)
    seed: NonNegativeInt = 0
    """random seed of synthetic samples, of the teacher model that labels them, and of shuffle"""
    workers: Workers = 2
    """loader processes per rank; 0 reads in the training process. Runs on GPUs make synthetic samples there, without
    processes"""
    prefetch: Prefetch = 4
    """number of batches that each worker reads ahead"""

    def __post_init__(self) -> None:
        if self.kind.startswith("criteo") and self.dense_features != CRITEO_DENSE:
            raise InputError(
                f"data.dense_features: {self.dense_features}, but a sample of data.kind {self.kind} has "
                f"{CRITEO_DENSE}; leave the key out, or set data.kind prepared, for data of your own"
            )
        given = [f"{key} {value}" for key in SELECTION if (value := getattr(self, key)) is not None]
        if len(given) > 1:
            raise InputError(
                f"data: {' and '.join(given)} each select the samples to evaluate; set all but one of them to null"
            )

    def require_source(self) -> None:
        """Check that the keys say where the samples come from.

        Raises:
            InputError: if a key that `kind` needs is missing, or one that it excludes is set.
        """
        if self.kind == "synthetic":
            if self.path:
                raise InputError(
                    f"data.path: {self.path!r}, but data.kind is synthetic; set data.kind to prepared, if "
                    f"`dlrm-overlap prepare` wrote it, or to its format"
                )
            for key, unset in (*((key, "null") for key in (*SELECTION, "eval_window")), ("train_from", 0)):
                if value := getattr(self, key):
                    raise InputError(
                        f"data.{key}: {value}, but data.kind is synthetic, and this key is for samples in files; set "
                        f"it to {unset}"
                    )
            self.tables.number()
            if self.tables.rows is None:
                raise InputError("data.tables.rows: null, but synthetic tables need their rows; set data.tables.rows")
            if self.shuffle:
                raise InputError(f"data.shuffle: {self.shuffle}, but synthetic samples have no order; leave it out")
        elif self.tables.has_wide_ids:
            raise InputError(
                f"data.tables.ids: {self.tables.ids}, but data.kind {self.kind} reads files, which say what their ids "
                f"are; leave it out, and write any: true, or rows to hash, into the schema of `prepare`"
            )
        elif self.path is None:
            raise InputError(f"data.path: null, but data.kind {self.kind} reads files; set data.path")
        elif self.kind.startswith("criteo") and (tables := self.tables.number(CRITEO_TABLES)) != CRITEO_TABLES:
            raise InputError(
                f"data.tables: {tables} tables, but a sample of data.kind {self.kind} has {CRITEO_TABLES}; correct the "
                f"lists, or, for other data, set data.kind prepared"
            )


@dataclass(frozen=True)
class SequenceConfig:
    """A feature that the model attends to instead of pooling it (`train/attention.py`)."""

    history: NonNegativeInt | None = None
    """index of the table, from 0, whose bags are histories, newest id first; null pools all tables"""
    candidate: NonNegativeInt = 0
    """index of the table whose pooled embedding is the attention's query"""
    positions: PositiveInt = 64
    """number of newest ids of a history that are attended to; older ones are ignored"""
    heads: PositiveInt = 2
    """number of attention heads"""

    def __post_init__(self) -> None:
        if self.history == self.candidate:
            raise InputError(
                f"model.sequence.candidate: {self.candidate} is the history itself; name another table by its number"
            )

    def check_tables(self, tables: int) -> None:
        """Raise an `InputError` if the history or the candidate is not one of `tables` tables."""
        for name, table in (("history", self.history), ("candidate", self.candidate)):
            if self.history is not None and table is not None and table >= tables:
                raise InputError(f"model.sequence.{name}: {table} is no table; the {tables} count from 0")


@dataclass(frozen=True)
class ModelConfig:
    """The DLRM's architecture and sizes."""

    arch: Literal["dot", "dcn"] = "dot"
    """interaction: pairwise dot products (dot, DLRM) or a low-rank cross network (dcn, DCNv2)"""
    dim: Dim = 16
    """embedding dimension D, a multiple of 4"""
    bottom_mlp: list[PositiveInt] = field(default_factory=lambda: [64, 16])
    """layer sizes of the bottom MLP; the last equals dim"""
    top_mlp: list[PositiveInt] = field(default_factory=lambda: [64, 32, 1])
    """layer sizes of the top MLP; the last is the number of labels"""
    top_parallel: Literal["data", "tensor"] = "data"
    """how the top MLP is parallelized. data: each rank computes all layers for its own samples. tensor: pairs of layers
    are split over the ranks as in Megatron-LM, which sends fewer bytes if layers are wide and a rank has few samples;
    the last layer, and pairs whose inner width is not divisible by the number of ranks, stay whole"""
    activation: Literal["relu", "gelu"] = "relu"
    """activation of the MLPs; gelu is smooth, so rounding differences between runs grow more slowly"""
    cross_layers: PositiveInt = 3
    """dcn: number of cross layers"""
    cross_rank: PositiveInt = 512
    """dcn: rank of each cross layer"""
    sequence: SequenceConfig = field(default_factory=SequenceConfig)

    def __post_init__(self) -> None:
        if self.bottom_mlp[-1:] != [self.dim]:
            raise InputError(f"model.bottom_mlp: {self.bottom_mlp} must end in model.dim, {self.dim}")
        if len(self.top_mlp) < 2:
            raise InputError(
                f"model.top_mlp: {self.top_mlp} must have a hidden layer and end in a logit for each label"
            )

    def check_samples(self, tables: int, labels: int) -> None:
        """Raise an `InputError` if the model does not fit samples with `tables` tables and `labels` labels."""
        self.sequence.check_tables(tables)
        if self.top_mlp[-1] != labels:
            raise InputError(
                f"model.top_mlp: {self.top_mlp} ends in {self.top_mlp[-1]}, but a sample has {labels} "
                f"label{'s' * (labels > 1)}; end it in {labels}, a logit for each label"
            )


@dataclass(frozen=True)
class IdTablesConfig:
    """Tables of any id: which ids get a row, and which lose it again."""

    rows: PositiveInt | list[PositiveInt] | None = None
    """rows of each table of any id, one value or one per such table; rounded up to a multiple of 128 times the number
    of ranks. 1 of 128 rows is kept for ids without a row"""
    admit_after: PositiveInt = 1
    """number of times that an id must be seen before it gets a row; 1 gives it one at once. Ids are counted in a
    sketch, which may count too many, and which forgets (admit_memory)"""
    admit_memory: PositiveFloat | None = 1.0
    """admit_after: how many sightings the sketch remembers. A bucket of 128 rows has 128 counters. Once their mean is
    admit_memory * (admit_after - 1), all are halved, so that only recent sightings count. null: never, so in the end
    every new id seems to have been seen and gets a row at once"""
    admit_share: Share = 1.0
    """share of the ids that may get a row, chosen by a hash of the id"""
    eviction: Literal["none", "lru", "lfu", "distance_lfu", "ttl"] = "lru"
    """which id loses its row if a bucket of 128 rows is full; never one of the current or the previous step. lru: the
    one that has not been seen for the longest time. lfu: the one seen least often. distance_lfu: the one with the
    fewest sightings divided by the steps since the last. ttl: the oldest of those not seen for ttl_steps. none: no
    id"""
    ttl_steps: PositiveInt | None = None
    """ttl: number of steps without a sighting after which an id may lose its row"""
    grow_at: Share | None = None
    """share of a table's rows in use on some rank, above which the table doubles its rows: at the next line of the log
    the run saves, and goes on from this checkpoint with more rows. A bucket may be full earlier. null: never"""
    max_rows: PositiveInt | list[PositiveInt] | None = None
    """grow_at: rows that a table does not exceed, one value or one per table of any id; null is no limit"""

    def __post_init__(self) -> None:
        if (self.eviction == "ttl") != (self.ttl_steps is not None):
            raise InputError(
                f"embedding.id_tables: eviction {self.eviction}, ttl_steps {self.ttl_steps}; give ttl_steps with "
                f"eviction ttl, and with no other"
            )
        if self.max_rows is not None and self.grow_at is None:
            raise InputError(
                f"embedding.id_tables.max_rows: {self.max_rows} without grow_at; give grow_at, the share of rows in "
                f"use above which a table grows, such as 0.8"
            )

    def check_tables(self, rows: Sequence[int | None]) -> None:
        """Raise an `InputError` if a key is given, but no table takes any id; `rows` has None for a table that does."""
        unset = IdTablesConfig()
        given = [f"{key} {value}" for key, value in vars(self).items() if value != getattr(unset, key)]
        if given and None not in rows:
            raise InputError(
                f"embedding.id_tables: {', '.join(given)}, but no table takes any id; leave the section out, or take "
                f"data.tables.ids any, or for files any: true in the schema of `prepare`"
            )


@dataclass(frozen=True)
class EmbeddingConfig:
    """The embedding stage: from ids to pooled embeddings, and from their gradients to updated rows."""

    backend: BackendName = AUTO
    """torchrec: FBGEMM's lookup and an All-to-All by NCCL (gloo on CPU). nccl: this project's lookup and the same
    All-to-All. pgas: kernels store pooled rows straight into the peers' memory. fused: the same by one persistent
    kernel, for short steps that are not captured; on CPUs identical to pgas. auto: pgas where it works and all ranks
    are in one node, else torchrec; the log says which, and why"""
    schedule: Literal["linear", "remote_first", "balanced"] = "balanced"
    """pgas, fused, on GPUs: order in which a rank stores to its peers"""
    put: Literal["direct", "staged"] = "direct"
    """fused, on GPUs: how pooled rows reach a peer. direct: each row is stored there when it is pooled. staged: rows
    are pooled into a local buffer, and the program that finishes a slice copies it"""
    slice_bags: SliceBags = 32
    """fused, put staged: bags of one table per slice; a power of two, at least 4"""
    programs_per_sm: PositiveInt | None = None
    """fused: programs of the persistent kernel per multiprocessor; null takes as many as fit"""
    nodes: PositiveInt | Literal["auto"] = "auto"
    """pgas, fused: number of nodes. auto detects which ranks can store into each other's memory, on a machine or in an
    NVLink domain of several machines; a number emulates that many nodes of consecutive ranks, for tests"""
    internode: Literal["messages", "puts"] = "messages"
    """pgas, fused, GPUs on several nodes: how pooled rows are sent to other nodes. messages: one NCCL call per step.
    puts: kernels send each group of rows by NVSHMEM when it is ready; tested on emulated nodes only"""
    aggregate_bytes: NonNegativeInt = 65536
    """pgas, fused, internode puts: minimum bytes per group of rows; 0 takes the smallest groups"""
    wait_timeout_s: Seconds = 600.0
    """seconds that a step, an evaluation or a save may wait for another rank or a loader process; after that the run
    ends with an error that names it"""
    plan: Literal["auto", "torchrec", "table_wise", "column_wise", "row_wise"] = "auto"
    """how tables are placed on ranks. auto balances rows read and columns sent, and splits tables where necessary, by
    columns or by rows (row-wise optimizers and LAMB: by rows only). The other values leave the plan to TorchRec's
    planner: torchrec allows every sharding type, the rest only the type named"""
    memory: Memory | list[Memory] = "gpu"
    """where a table's rows and optimizer states are kept; one value, or one per table. gpu: in GPU memory. cached: in
    host memory, with a cache on the GPU that is filled one step ahead (pgas, fused with pipeline graph; torchrec by
    FBGEMM, but for tables of any id). auto: caches the largest tables until the others fit. On CPUs all tables are in
    host memory"""
    cache_fraction: Share = 0.2
    """cached tables: fraction of the rows that the GPU's cache holds; with pgas and fused at least the ids of two
    steps"""
    optimizer: TableOptimizer = "rowwise_adagrad"
    """optimizer of the tables, fused into the backward; there is no Adam or LAMB on CPUs"""
    lr: PositiveFloat = 0.05
    """learning rate of the tables"""
    eps: PositiveFloat = 1e-8
    """epsilon of Adagrad, Adam and LAMB"""
    weight_dtype: Literal["fp32", "fp16"] = "fp32"
    """data type of the rows"""
    id_tables: IdTablesConfig = field(default_factory=IdTablesConfig)
    wire_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """data type in which pooled embeddings and their gradients are sent; auto is bf16 if train.precision is bf16 and
    the run's backend is not torchrec, else fp32"""

    def __post_init__(self) -> None:
        caches = self.backend in (AUTO, "torchrec") or BACKENDS[self.backend].stores_to_peers
        if self.may_cache and not caches:
            raise InputError(
                f"embedding.memory: {self.memory}, but backend {self.backend} updates rows on the GPU alone; take "
                f"backend pgas, fused or torchrec"
            )

    def resolved_wire_dtype(self, precision: str) -> str:
        """Return `wire_dtype`, where auto becomes bf16 for a dense part in bf16, and otherwise fp32."""
        if self.wire_dtype != AUTO:
            return self.wire_dtype
        assert self.backend != AUTO, "the backend is chosen before its wire type"
        return "bf16" if precision == "bf16" and self.backend != "torchrec" else "fp32"

    @property
    def may_cache(self) -> bool:
        """Whether some table may be cached."""
        return any(each != "gpu" for each in ([self.memory] if isinstance(self.memory, str) else self.memory))


@dataclass(frozen=True)
class TrainConfig:
    """The training run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses GPUs if there are any"""
    batch_size: PositiveInt = 512
    """samples per rank and step; as an option, it replaces a file's global_batch_size"""
    global_batch_size: PositiveInt | None = None
    """samples of all ranks per step; overrides batch_size, must be divisible by the number of ranks"""
    steps: PositiveInt | None = None
    """number of training steps; null trains for epochs"""
    epochs: PositiveInt = 1
    """passes over a finite data set, if steps is null; samples at the end that fill no global batch are left out"""
    optimizer: Literal["sgd", "adagrad", "adam"] = "adagrad"
    """optimizer of the dense part"""
    lr: PositiveFloat = 0.05
    """learning rate of the dense part"""
    eps: PositiveFloat = 1e-8
    """epsilon of the dense part's Adagrad and Adam"""
    warmup_steps: NonNegativeInt = 0
    """number of steps in which both learning rates rise linearly to their value"""
    decay_start_step: NonNegativeInt = 0
    """step at which the learning rates' decay begins"""
    decay_steps: NonNegativeInt = 0
    """number of steps of the quadratic decay to zero; 0 is no decay"""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """precision of the dense part: fp32, tf32 matrix products (GPU) or bf16 autocast"""
    graph_dense: bool = False
    """capture the dense part's forward and backward as CUDA graphs (GPU), if the whole step is not captured"""
    compile_dense: bool = False
    """compile the dense part by torch.compile, which takes a minute the first time and seconds later; on CPUs it needs
    a C++ compiler. With pipeline graph, small MLPs in fp32 (up to 4 layers of 128) are one kernel each way instead"""
    cross_kernel: Literal["auto", "triton", "cutlass"] = "auto"
    """pipeline graph, bf16, compile_dense: how a cross layer computes its output. triton: cuBLAS's product, then an
    elementwise kernel. cutlass: a product whose epilogue does the elementwise work; needs the extra cutlass and GPUs of
    compute capability 9.0. auto: cutlass where possible"""
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    """pipeline graph: data type in which dense gradients are sent"""
    dense_reduce: Literal["auto", "collective", "stores"] = "auto"
    """pipeline graph: how dense gradients are averaged over the ranks. collective: by NCCL (gloo on CPU). stores:
    kernels load and store in the peers' memory. auto: stores if all ranks are GPUs of one node"""
    dense_update: Literal["auto", "all", "owner", "owner_deferred"] = "auto"
    """pipeline graph: which ranks update a dense weight. all: every rank. owner: the rank that averages its gradient,
    which then stores it as bf16 at all ranks; needs precision bf16, flat_dense and dense_reduce stores, else all do,
    with a warning. owner_deferred: owner, but the last bucket is updated while the next step looks up rows, which
    has saved time on two GPUs, and none on four. auto: owner where possible"""
    pipeline: Literal["auto", "torchrec", "graph"] = "auto"
    """torchrec: TrainPipelineSparseDist, which overlaps the next batches' copy and id exchange with the step. graph:
    whole steps are CUDA graphs (pgas and fused only). auto: graph on GPUs where possible"""
    capture: bool = True
    """pipeline graph: capture steps in CUDA graphs (GPU); false issues the same kernels one by one, for debugging"""
    flat_dense: bool = True
    """pipeline graph, bf16: cast the dense parameters in the kernel that updates them; false leaves casts to
    autocast"""
    eval_every: NonNegativeInt = 0
    """steps between evaluations; 0 evaluates only at the end"""
    target_auroc: BelowOne = 0.0
    """stop as soon as an evaluation reaches this AUROC; 0 is off"""
    seed: NonNegativeInt = 0
    """random seed of the initial weights"""

    def __post_init__(self) -> None:
        if self.decay_start_step and not self.decay_steps:
            raise InputError(
                f"train.decay_start_step: {self.decay_start_step}, but train.decay_steps 0 is no decay; set decay_steps"
            )
        if self.decay_steps and self.decay_start_step < self.warmup_steps:
            raise InputError(
                f"train.decay_start_step: {self.decay_start_step} must not be before the end of the warm-up, "
                f"train.warmup_steps {self.warmup_steps}"
            )

    def samples_per_rank(self, world_size: int) -> int:
        """Return the number of samples that one rank has in a step.

        Raises:
            InputError: if the ranks cannot share the global batch evenly.
        """
        if self.global_batch_size is None:
            return self.batch_size
        if self.global_batch_size % world_size:
            raise InputError(
                f"train.global_batch_size: {self.global_batch_size} samples do not divide by {world_size} ranks; "
                f"take {math.ceil(self.global_batch_size / world_size) * world_size}"
            )
        return self.global_batch_size // world_size


@dataclass(frozen=True)
class LogConfig:
    """The log of a run: folder, log lines, TensorBoard events and traces."""

    dir: FullPath = "runs"
    """folder of the runs; this run writes to dir/name"""
    name: FolderName | None = None
    """name of the run; null takes embedding.backend as it is set, so auto is named auto on every machine"""
    every: PositiveInt = 10
    """steps between two log lines"""
    tensorboard: bool = True
    """write TensorBoard events"""
    trace_steps: NonNegativeInt = 0
    """number of steps to trace by torch.profiler into dir/name/traces, one file per rank; 0 is off"""
    trace_first: PositiveInt = 20
    """first step to trace, counted from 1"""
    overwrite: bool = False
    """start a new run even if dir/name has an earlier one, which is moved to dir/name/earlier_1 (or the next free
    number)"""

    @property
    def traced(self) -> range:
        return range(self.trace_first, self.trace_first + self.trace_steps)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    every: NonNegativeInt = 0
    """steps between checkpoints; 0 saves only at the end"""
    last: bool = True
    """save after the last step, also after an early stop"""
    keep: PositiveInt = 2
    """number of most recently saved checkpoints to keep"""
    asynchronous: bool = False
    """save while training continues, from a copy of the state; needs as much additional host memory as the tables and
    their optimizer states take"""
    resume: FullPath = "auto"
    """auto continues from the newest checkpoint in dir/name, if there is one; otherwise the path of a checkpoint. never
    starts a new run"""
    allow_config_mismatch: bool = False
    """resume even if the samples, the global batch size or a seed differ from the checkpoint's"""
    delta_every: NonNegativeInt = 0
    """steps between two deltas, which have what training has changed since the last one; 0 is off. Needs backend pgas
    or fused, tables in GPU memory, and pyarrow"""
    delta_dtype: Literal["float32", "int8"] = "float32"
    """elements of the rows in deltas: as trained, or rounded to 255 steps between a row's least and greatest"""
    delta_keep: PositiveInt | None = None
    """number of most recent deltas to keep; null keeps all"""


@dataclass(frozen=True)
class Config:
    """A run: every key that `dlrm-overlap train` takes."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        self.data.require_source()
        if self.data.kind == "synthetic" and self.train.steps is None:
            raise InputError("train.steps: null, but synthetic data has no end; set train.steps")
        if self.data.kind != "prepared":  # its files give the numbers of tables and labels
            self.model.check_samples(self.data.tables.number(CRITEO_TABLES), labels=1)
        if self.embedding.id_tables.grow_at is not None and self.checkpoint.delta_every:
            raise InputError(
                f"embedding.id_tables.grow_at: {self.embedding.id_tables.grow_at} with checkpoint.delta_every "
                f"{self.checkpoint.delta_every}; a delta has the rows of its checkpoint, so set one to null or 0"
            )
        if self.embedding.id_tables.grow_at is not None and not (self.checkpoint.every or self.checkpoint.last):
            raise InputError(
                f"embedding.id_tables.grow_at: {self.embedding.id_tables.grow_at}, but checkpoint.every is 0 and "
                f"checkpoint.last false; tables grow by a checkpoint, so set one of these"
            )

    @property
    def folder(self) -> Path:
        return Path(self.log.dir) / (self.log.name or self.embedding.backend)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


RENAMED_KEYS = {
    "embedding.hosts": "embedding.nodes",
    "embedding.between_hosts": "embedding.internode",
    "network.hosts": "network.nodes",
    "network.gpus_per_host": "network.gpus_per_node",
    "log.replace": "log.overwrite",
    "checkpoint.resume_changed": "checkpoint.allow_config_mismatch",
}
"""earlier names, accepted with a warning -> current names"""
RENAMED_VALUES = {"embedding.put": {"in_place": "direct", "stores": "staged"}}
"""key -> earlier names of values, accepted with a warning -> current ones"""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by dotted keys: {"a.b": 1} for {"a": {"b": 1}}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def parse_multi_hot(spec: int | str) -> tuple[int, int]:
    """Return the minimum and maximum number of ids in a bag: (3, 3) for `3`, (0, 8) for `"0..8"`.

    Raises:
        InputError: if `spec` is neither a number nor a range.
    """
    text = str(spec)
    match = _RANGE.fullmatch(text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if low > high or high == 0 or high > _MAX_HOT:
        raise InputError(
            f"data.tables.multi_hot: {text!r:.100} is not a number of ids a bag, 1 to {_MAX_HOT}, or a range of them; "
            f"write 3 or '0..8'"
        )
    return low, high
