"""The configuration: one frozen dataclass a section, each checked when it is built.

Every key may be set in the YAML file (`--config`) or on the command line (`--train.steps 40`). The text below a key is
its meaning, with its unit, in `--help` and in the table of all keys. A value that breaks a rule raises `InputError`,
whose message is one line: value, rule, cure.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from dlrm_overlap.backends import BACKENDS


class ValueRule(NamedTuple):
    """A rule of a key's value, beside its type."""

    words: str
    """in messages: a value is not .."""
    holds: Callable[[Any], bool]


# Kernels and seeds take 32 bits.
PositiveInt = Annotated[int, ValueRule("a whole number from 1 to 2^31 - 1", lambda value: 0 < value < 2**31)]
NonNegativeInt = Annotated[int, ValueRule("a whole number from 0 to 2^31 - 1", lambda value: 0 <= value < 2**31)]
# Optimizers and losses compute with these, and with small multiples of them, in floating point of 32 bits.
PositiveFloat = Annotated[float, ValueRule("a number from 1e-37 to 1e37", lambda value: 1e-37 <= value <= 1e37)]
NonNegativeFloat = Annotated[float, ValueRule("a number from 0 to 1e37", lambda value: 0 <= value <= 1e37)]
BelowOne = Annotated[float, ValueRule("a number from 0 to below 1", lambda value: 0 <= value < 1)]
Share = Annotated[float, ValueRule("a number above 0, up to 1", lambda value: 0 < value <= 1)]
Seconds = Annotated[float, ValueRule("a number of seconds from 0.1 to 86400", lambda value: 0.1 <= value <= 86400)]
HalfLife = Annotated[
    int, ValueRule("a whole number from 0 to 100", lambda value: 0 <= value <= 100)
]  # sums fit 32 bits
Prefetch = Annotated[
    int, ValueRule("a whole number from 1 to 128", lambda value: 0 < value <= 128)
]  # a pipe holds as many
Workers = Annotated[
    int, ValueRule("a whole number from 0 to 256", lambda value: 0 <= value <= 256)
]  # processes of a rank
SliceBags = Annotated[int, ValueRule("a power of two from 4 on", lambda value: value >= 4 and value.bit_count() == 1)]
Dim = Annotated[int, ValueRule("a multiple of 4 above 0", lambda value: value > 0 and value % 4 == 0)]  # as FBGEMM asks
_NAME_BYTES, _PATH_BYTES = 255, 2048  # Linux takes paths of 4095 bytes; a run makes files below the one it is given


def _is_path(value: str) -> bool:
    try:
        encoded = value.encode()  # as the run writes it into its files
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
        f"a path written in full (after = and in files no shell replaces ~), of at most {_PATH_BYTES} bytes of UTF-8, "
        f"{_NAME_BYTES} per name",
        _is_path,
    ),
]
FolderName = Annotated[
    str,
    ValueRule(
        f"the name of one folder, of at most {_NAME_BYTES} bytes, which the run makes in log.dir",
        lambda value: value not in ("", ".", "..") and "/" not in value and value.isprintable() and _is_path(value),
    ),
]
TableOptimizer = Literal[
    "sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb"
]
Memory = Literal["gpu", "cached", "auto"]
BackendName = Annotated[str, ValueRule(f"one of {', '.join(map(repr, BACKENDS))}", BACKENDS.__contains__)]

CRITEO_DENSE, CRITEO_TABLES = 13, 26
HELD_BATCHES = 3  # that loader processes keep beyond those read ahead: copies of so many may be under way at once
_MOST_HOT = 100_000  # ids of a bag
_RANGE = re.compile(r"([0-9]{1,18})(?:\.\.([0-9]{1,18}))?")


class InputError(ValueError):
    """A user's mistake. Its message is one line: value, rule, cure. The command line prints it and ends with code 2."""


class PeerError(RuntimeError):
    """Another rank has failed where this one needs it. Its message is one line: that rank, and its error."""


def in_one_line(error: BaseException | str) -> str:
    """Return an error's text in one line: each run of white space is one blank."""
    return " ".join(str(error).split())


@dataclass(frozen=True)
class TablesConfig:
    """The embedding tables. A single value stands for every table, a list gives one a table."""

    count: PositiveInt | None = None
    """synthetic: number of tables; null takes the length of the lists"""
    rows: PositiveInt | list[PositiveInt] | None = None
    """rows a table; null for prepared samples, which have their own"""
    max_rows: PositiveInt | None = None
    """cap on the rows of every table; Criteo's ids are folded into it by modulo"""
    multi_hot: PositiveInt | str | list[PositiveInt | str] = 1
    """ids a bag: 3, or '0..8' for a uniform range (0 gives empty bags)"""
    zipf_alpha: NonNegativeFloat | list[NonNegativeFloat] = 1.05
    """skew of the synthetic ids, P(k-th row) ~ 1/k^alpha; 0 is uniform"""
    half_life: HalfLife | list[HalfLife] = 0
    """synthetic, for histories, newest id first: positions after which an id counts half as much to the labels, so that
    their order matters; 0 has all ids of a bag count alike"""

    def __post_init__(self) -> None:
        for spec in self.multi_hot if isinstance(self.multi_hot, list) else [self.multi_hot]:
            parse_multi_hot(spec)
        lengths = {len(value) for value in self._per_table if isinstance(value, list)}
        if len(lengths | ({self.count} if lengths and self.count else set())) > 1:
            raise InputError(
                f"data.tables: count {self.count}, lists of {sorted(lengths)} values; count, rows, multi_hot, "
                f"zipf_alpha and half_life must agree on the number of tables"
            )

    @property
    def _per_table(self) -> tuple[Any, ...]:
        return self.rows, self.multi_hot, self.zipf_alpha, self.half_life

    def number(self, default: int | None = None) -> int:
        """Return the number of tables T, or `default` where no key gives it.

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
    """synthetic | prepared (by `prepare`) | criteo_npy (TorchRec's day files) | criteo_multihot (MLPerf's npz)"""
    path: FullPath | None = None
    """file or folder of the samples; needed by all kinds but synthetic"""
    eval_path: FullPath | None = None
    """file or folder of the held-out samples; null holds out the last eval_fraction of path"""
    eval_fraction: BelowOne = 0.25
    """share of path's samples, the last ones, held out for evaluation"""
    shuffle: NonNegativeInt = 0
    """files: so many successive samples to train on are taken in an order drawn from seed, in each pass another; 0
    keeps the files' order"""
    eval_samples: PositiveInt = 65536
    """synthetic: samples of an evaluation"""
    dense_features: PositiveInt = CRITEO_DENSE
    """synthetic: dense features a sample"""
    tables: TablesConfig = field(default_factory=TablesConfig)
    seed: NonNegativeInt = 0
    """seed of synthetic samples, of the teacher that labels them, and of shuffle"""
    workers: Workers = 2
    """loader processes a rank; 0 reads in the training process"""
    prefetch: Prefetch = 4
    """batches each worker reads ahead"""

    def __post_init__(self) -> None:
        if self.kind.startswith("criteo") and self.dense_features != CRITEO_DENSE:
            raise InputError(
                f"data.dense_features: {self.dense_features}, but a sample of data.kind {self.kind} has "
                f"{CRITEO_DENSE}; leave the key out, or set data.kind prepared, for data of your own"
            )

    def require_source(self) -> None:
        """Check that the keys say in full where the samples come from.

        Raises:
            InputError: if a key is missing that `kind` needs.
        """
        if self.kind == "synthetic":
            if self.path:
                raise InputError(f"data.path: {self.path!r}, but data.kind is synthetic; set data.kind to its format")
            self.tables.number()
            if self.tables.rows is None:
                raise InputError("data.tables.rows: null, but synthetic tables need their rows; set data.tables.rows")
            if self.shuffle:
                raise InputError(f"data.shuffle: {self.shuffle}, but synthetic samples have no order; leave it out")
        elif self.path is None:
            raise InputError(f"data.path: null, but data.kind {self.kind} reads files; set data.path")
        elif self.kind.startswith("criteo") and (tables := self.tables.number(CRITEO_TABLES)) != CRITEO_TABLES:
            raise InputError(
                f"data.tables: {tables} tables, but a sample of data.kind {self.kind} has {CRITEO_TABLES}; correct the "
                f"lists, or, for other data, set data.kind prepared"
            )


@dataclass(frozen=True)
class SequenceConfig:
    """A feature that the model attends to instead of pooling it: `train/attention.py`."""

    history: NonNegativeInt | None = None
    """number of the table, from 0 on, whose bags are histories, newest id first; null pools all tables"""
    candidate: NonNegativeInt = 0
    """number of the table whose pooled embedding asks the history what it holds about it"""
    positions: PositiveInt = 64
    """newest ids of a history that are attended to; older ones are left out"""
    heads: PositiveInt = 2
    """queries of a candidate"""

    def __post_init__(self) -> None:
        if self.history == self.candidate:
            raise InputError(
                f"model.sequence.candidate: {self.candidate} is the history itself; name another table by its number"
            )

    def check_tables(self, tables: int) -> None:
        """Raise an InputError if the history or its candidate is not one of so many tables."""
        for name, table in (("history", self.history), ("candidate", self.candidate)):
            if self.history is not None and table is not None and table >= tables:
                raise InputError(f"model.sequence.{name}: {table} is no table; the {tables} count from 0")


@dataclass(frozen=True)
class ModelConfig:
    """The DLRM's sizes."""

    arch: Literal["dot", "dcn"] = "dot"
    """interaction: pairwise dot products (DLRM) or a low-rank cross network (DCNv2)"""
    dim: Dim = 16
    """embedding dimension D, a multiple of 4"""
    bottom_mlp: list[PositiveInt] = field(default_factory=lambda: [64, 16])
    """layer sizes of the bottom MLP; the last is dim"""
    top_mlp: list[PositiveInt] = field(default_factory=lambda: [64, 32, 1])
    """layer sizes of the top MLP; the last is the number of labels"""
    top_parallel: Literal["data", "tensor"] = "data"
    """how ranks share the top MLP. data: each computes all of it for its samples. tensor: the weights of pairs of
    layers are divided over the ranks and activations travel, fewer bytes where layers are wide and a rank's samples
    few; the logit's layer, a layer without a pair, and pairs whose inner width the ranks do not divide stay whole"""
    activation: Literal["relu", "gelu"] = "relu"
    """activation of the MLPs; gelu is smooth, so runs that differ by rounding stay together longer"""
    cross_layers: PositiveInt = 3
    """dcn: cross layers"""
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


@dataclass(frozen=True)
class EmbeddingConfig:
    """The embedding stage: ids in, pooled embeddings out, gradients back."""

    backend: BackendName = "torchrec"
    """torchrec: FBGEMM's lookup, then an All-to-All of NCCL (gloo on CPU). nccl: our lookup, then the same. pgas:
    pooled rows stored straight into the peers' memory. fused: the same by one persistent kernel, for steps that are
    short and not captured; on CPUs the same as pgas"""
    schedule: Literal["linear", "remote_first", "balanced"] = "balanced"
    """pgas, fused, on GPUs: order of the destinations"""
    put: Literal["direct", "staged"] = "direct"
    """fused, on GPUs: how pooled rows get into the peer's window. direct: each row is stored there when it is pooled.
    staged: rows are pooled into a local buffer, and the program that finishes a slice copies it to the peer"""
    slice_bags: SliceBags = 32
    """fused, put staged: bags of a table in a slice; a power of two from 4 on"""
    programs_per_sm: PositiveInt | None = None
    """fused: programs of the persistent kernel a multiprocessor; null takes as many as fit"""
    nodes: PositiveInt | Literal["auto"] = "auto"
    """pgas, fused: auto finds out which ranks can store into each other's memory; the others exchange messages. For
    tests, a number emulates that many nodes with consecutive ranks; 1 has all ranks store to each other"""
    internode: Literal["messages", "puts"] = "messages"
    """pgas, fused, GPUs on several nodes: how pooled rows are sent to other nodes. messages: one NCCL call sends all
    rows of a step, like all other data. puts: kernels send each group of rows when it is ready, by NVSHMEM; tested on
    emulated nodes only"""
    aggregate_bytes: NonNegativeInt = 65536
    """pgas, fused, internode puts: least bytes of a group of rows; 0 takes the smallest groups"""
    wait_timeout_s: Seconds = 600.0
    """every backend: a step, an evaluation or a save that waits longer for another rank or a loader process ends the
    run, and names it"""
    plan: Literal["auto", "torchrec", "table_wise", "column_wise", "row_wise"] = "auto"
    """auto balances rows read and columns sent over the ranks; where necessary it cuts tables of many ids by columns,
    but not under row-wise optimizers and LAMB, else by rows; of several nodes by rows, within one. The others leave the
    plan to TorchRec's planner: torchrec with shards of any type, the rest with those of their type alone"""
    memory: Memory | list[Memory] = "gpu"
    """where a table's rows and their optimizer's states are: gpu, or cached: in the host's memory, with a
    cache on the GPU, filled a step ahead. auto caches the largest tables until the others fit on the GPUs. One value,
    or one a table; pgas and fused cache in a step as train.pipeline graph takes it, torchrec by FBGEMM"""
    cache_fraction: Share = 0.2
    """cached tables: the share of the rows for which there is room on the GPU; with pgas and fused at least the ids of
    two steps"""
    optimizer: TableOptimizer = "rowwise_adagrad"
    """optimizer of the tables, fused into the backward; of Adam and LAMB FBGEMM has no form for CPUs"""
    lr: PositiveFloat = 0.05
    """learning rate of the tables"""
    eps: PositiveFloat = 1e-8
    """epsilon of Adagrad, Adam and LAMB"""
    weight_dtype: Literal["fp32", "fp16"] = "fp32"
    """storage of the rows"""
    wire_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """pooled embeddings and their gradients between ranks; auto is bf16 where train.precision is bf16 and the backend
    is not torchrec, else fp32"""

    def __post_init__(self) -> None:
        caches = self.backend == "torchrec" or BACKENDS[self.backend].stores_to_peers
        if self.may_cache and not caches:
            raise InputError(
                f"embedding.memory: {self.memory}, but backend {self.backend} updates rows on the GPU alone; take "
                f"backend pgas, fused or torchrec"
            )

    def resolved_wire_dtype(self, precision: str) -> str:
        """Return `wire_dtype`, with auto resolved for a dense part that computes in `precision`."""
        if self.wire_dtype != "auto":
            return self.wire_dtype
        return "bf16" if precision == "bf16" and self.backend != "torchrec" else "fp32"

    @property
    def may_cache(self) -> bool:
        """Whether a table may be cached."""
        return any(each != "gpu" for each in ([self.memory] if isinstance(self.memory, str) else self.memory))


@dataclass(frozen=True)
class TrainConfig:
    """The training run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if there are any"""
    batch_size: PositiveInt = 512
    """samples a rank, b"""
    global_batch_size: PositiveInt | None = None
    """samples of all ranks, B; overrides batch_size, must divide by the number of ranks"""
    steps: PositiveInt | None = None
    """training steps; null runs data's epochs"""
    epochs: PositiveInt = 1
    """passes over a finite data set, where steps is null"""
    optimizer: Literal["sgd", "adagrad", "adam"] = "adagrad"
    """optimizer of the dense part"""
    lr: PositiveFloat = 0.05
    """learning rate of the dense part"""
    eps: PositiveFloat = 1e-8
    """epsilon of the dense part's Adagrad and Adam"""
    warmup_steps: NonNegativeInt = 0
    """steps over which both learning rates rise linearly to their value"""
    decay_start_step: NonNegativeInt = 0
    """step at which the decay begins"""
    decay_steps: NonNegativeInt = 0
    """steps of the quadratic decay to zero; 0 is none"""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """of the dense part: fp32, tf32 matrix products (GPU) or bf16 autocast"""
    graph_dense: bool = False
    """run the dense part's forward and backward as CUDA graphs (GPU), if the whole step is not captured"""
    compile_dense: bool = False
    """have torch.compile fuse the dense part's kernels when the run starts: a minute the first time, seconds from then
    on; on CPUs it needs a C++ compiler"""
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    """pipeline graph: in which the dense gradients are sent over the ranks"""
    dense_reduce: Literal["auto", "collective", "stores"] = "auto"
    """pipeline graph: how the dense gradients are summed over the ranks. collective: by NCCL (gloo on CPU). stores: by
    loads and stores of the peers' memory, in pieces. auto is stores between GPUs where all ranks are on one node"""
    pipeline: Literal["auto", "torchrec", "graph"] = "auto"
    """torchrec: TrainPipelineSparseDist, which overlaps the next batches' copy and id exchange with the step. graph:
    steps are CUDA graphs; pgas and fused alone. auto takes graph on GPUs where it can"""
    capture: bool = True
    """pipeline graph: capture steps in CUDA graphs (GPU); false issues the same kernels one by one, for debuggers"""
    flat_dense: bool = True
    """pipeline graph, bf16: the kernel that updates the dense parameters casts them, too, for the next step's products;
    false leaves casts to autocast"""
    eval_every: NonNegativeInt = 0
    """steps between evaluations; 0 evaluates at the end only"""
    target_auroc: BelowOne = 0.0
    """stop when an evaluation reaches this AUROC; 0 is off"""
    seed: NonNegativeInt = 0
    """seed of the initial weights"""

    def __post_init__(self) -> None:
        if self.decay_steps and self.decay_start_step < self.warmup_steps:
            raise InputError(
                f"train.decay_start_step: {self.decay_start_step} must not lie before the end of the warm-up, "
                f"train.warmup_steps {self.warmup_steps}"
            )

    def samples_per_rank(self, world_size: int) -> int:
        """Return b, the samples of one rank and step.

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
    """The log of a run: folder, lines, events and traces."""

    dir: FullPath = "runs"
    """folder of the runs; this one writes to dir/name"""
    name: FolderName | None = None
    """name of the run; null takes embedding.backend"""
    every: PositiveInt = 10
    """steps between two log lines"""
    tensorboard: bool = True
    """write TensorBoard events"""
    trace_steps: NonNegativeInt = 0
    """steps to trace by torch.profiler, into dir/name/traces, a file a rank; 0 is off"""
    trace_first: PositiveInt = 20
    """first step to trace, counted from 1"""
    overwrite: bool = False
    """start a new run although dir/name has an earlier one, which is moved to dir/name/earlier_1, or to the next free
    number"""

    @property
    def traced(self) -> range:
        """Steps to trace, counted from 1."""
        return range(self.trace_first, self.trace_first + self.trace_steps)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    every: NonNegativeInt = 0
    """steps between checkpoints; 0 saves none on the way"""
    last: bool = True
    """save after the last step, also that of an early stop"""
    keep: PositiveInt = 2
    """checkpoints to keep, those that were saved last"""
    asynchronous: bool = False
    """save while training goes on: a copy of the state is written, which takes as much memory of the host as the tables
    and their optimizer's state"""
    resume: FullPath = "auto"
    """auto goes on where dir/name left off; never starts anew; else the path of a checkpoint"""
    allow_config_mismatch: bool = False
    """go on although the samples, the global batch or a seed are not those that the checkpoint was trained with"""


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
        if self.data.kind != "prepared":  # else the files have the number of tables
            self.model.sequence.check_tables(self.data.tables.number(CRITEO_TABLES))

    @property
    def folder(self) -> Path:
        """Folder that the run writes to."""
        return Path(self.log.dir) / (self.log.name or self.embedding.backend)

    def as_dict(self) -> dict[str, Any]:
        """Return the keys and values as plain nested dictionaries, lists, numbers and strings."""
        return dataclasses.asdict(self)


RENAMED_KEYS = {
    "embedding.hosts": "embedding.nodes",
    "embedding.between_hosts": "embedding.internode",
    "network.hosts": "network.nodes",
    "network.gpus_per_host": "network.gpus_per_node",
    "log.replace": "log.overwrite",
    "checkpoint.resume_changed": "checkpoint.allow_config_mismatch",
}
"""names of earlier versions, which are accepted with a warning -> names"""
RENAMED_VALUES = {"embedding.put": {"in_place": "direct", "stores": "staged"}}
"""key -> likewise its values"""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by dotted keys: {"a.b": 1} for {"a": {"b": 1}}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def parse_multi_hot(spec: int | str) -> tuple[int, int]:
    """Return the least and the greatest number of ids in a bag: (3, 3) for `3`, (0, 8) for `"0..8"`.

    Raises:
        InputError: if `spec` is neither a number of ids nor a range of them.
    """
    text = str(spec)
    match = _RANGE.fullmatch(text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if low > high or high == 0 or high > _MOST_HOT:
        raise InputError(
            f"data.tables.multi_hot: {text!r:.100} is not a number of ids a bag, 1 to {_MOST_HOT}, or a range of them; "
            f"write 3 or '0..8'"
        )
    return low, high
