"""`dlrm-overlap predict`: a probability for each row and label of a table, with or without labels. Needs pyarrow."""

import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from dlrm_overlap.checkpoint.manifest import locate_checkpoint
from dlrm_overlap.config import FullPath, InputError, PositiveInt, in_one_line
from dlrm_overlap.data.encoding import Unknown, unknown_values
from dlrm_overlap.launching.files import replacing
from dlrm_overlap.launching.lifetime import end_with_parent, unwinding_on_sigterm
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.launching.progress_bar import ProgressBar
from dlrm_overlap.launching.text_table import count_of

_BLOCK_BYTES = 1 << 21  # of text
_CLOSING_S = 2.0
_OPTION = "--checkpoint"
_FORMATS = ".parquet", ".csv"

_scorer: Any = None  # of a worker process, or why it has none


def run(argv: list[str], description: str) -> int:
    parser = Parser("dlrm-overlap predict", description)
    text = "folder step_<N>, or a run's folder, for its newest checkpoint"
    parser.add_argument(_OPTION, type=FullPath, metavar="PATH", required=True, help=text)
    parser.add_argument("table", type=FullPath, metavar="TABLE", help="file or folder of files, as for `prepare table`")
    text = ".parquet or .csv file to write, with a row for each row of TABLE, in its order"
    parser.add_argument("--output", type=FullPath, required=True, help=text)
    text = "column of TABLE to copy to the output, such as a key"
    parser.add_argument("--key", type=str, action="append", default=[], help=text)
    parser.add_argument("--nproc", type=PositiveInt, default=1, help="number of processes")
    values = parser.read(argv)
    path, output = locate_checkpoint(Path(values.checkpoint), _OPTION), Path(values.output)
    if output.suffix.lower() not in _FORMATS:
        raise InputError(f"--output: {output} is not one of {', '.join(_FORMATS)}; name such a file")
    rows, unknown = predict(path, Path(values.table), output, values.key, values.nproc)
    print(f"{output}: {count_of(rows, 'row')}")
    for each in unknown:
        print(each)
    return 0


def predict(checkpoint: Path, table: Path, output: Path, keys: list[str], processes: int) -> tuple[int, list[Unknown]]:
    """Write the predictions for `table` to `output`, and return their number and the columns with unknown values.

    The file has the columns `keys` of the table, then a float32 probability for each label, under its name. It appears
    once it is complete.
    """
    from dlrm_overlap.data.table_files import count_rows, read_files, table_files
    from dlrm_overlap.predict.scorer import Scorer, read_encoding_of

    scorer = Scorer(checkpoint) if processes == 1 else None
    schema = scorer.schema if scorer else read_encoding_of(checkpoint).schema
    if twice := [name for name in keys if name in schema.labels or keys.count(name) > 1]:
        raise InputError(f"--key {twice[0]}: the output has a column of that name already; leave it out")
    names = list(dict.fromkeys([*schema.features, *keys]))
    files = table_files(table)
    if {output.resolve(), output.resolve().parent} & {each.resolve() for each in (table, *files)}:
        raise InputError(f"--output: {output} is a file of {table}, or in its folder; name a file elsewhere")

    try:
        with ExitStack() as stack:
            stack.enter_context(unwinding_on_sigterm())
            stream = stack.enter_context(replacing(output))
            score = stack.enter_context(_scoring(scorer, checkpoint, processes))
            bar = stack.enter_context(ProgressBar("predicting", count_rows(files)))
            cure = "correct the file, or --key" if keys else "correct the file"
            blocks = read_files(files, schema, _BLOCK_BYTES, bar, _as_block, cure, names)
            writer: Any = None
            types: Any = None
            all_values, all_unknown = Counter[str](), Counter[str]()
            for found, values, unknown in score(blocks, keys):
                if writer is None:
                    open_writer = csv.CSVWriter if output.suffix.lower() == ".csv" else parquet.ParquetWriter
                    writer = stack.enter_context(open_writer(stream, found.schema))
                    types = found.schema
                writer.write_table(_with_types(found, types))
                all_values.update(values)
                all_unknown.update(unknown)
                bar.advance(len(found))
            if not bar.count:
                raise InputError(f"{table}: no rows; name a file, or a folder, that has some")
    except OSError as error:
        reason = error.strerror or in_one_line(error)
        raise InputError(f"--output: {output} cannot be written ({reason}); name another file") from None
    except pa.ArrowException as error:  # such as lists in CSV
        named = f"--key {', '.join(keys)}: cannot be written to {output} ({in_one_line(error):.200})"
        raise InputError(f"{named}; leave out such a column, or name a .parquet file") from None
    return bar.count, unknown_values(all_values, all_unknown, schema)


Block = tuple[Path, int, Any]
"""a file, the number of a block's first row in it, and the block"""


def _as_block(*block: Any) -> Block:
    return block


@contextmanager
def _scoring(
    scorer: Any, checkpoint: Path, processes: int
) -> Iterator[Callable[[Iterator[Block], list[str]], Iterator[Any]]]:
    """Yield a function that maps blocks and names of keys to what `_score` returns, in order.

    Without a `scorer`, each of several processes loads the tables, and this one does not.
    """
    if scorer is not None:
        yield lambda blocks, keys: (_score(scorer, *block, keys) for block in blocks)
        return
    threads = max(1, (os.cpu_count() or 1) // processes)
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin_worker, (checkpoint, threads))
    timeout_s = None

    def score(blocks: Iterator[Block], keys: list[str]) -> Iterator[Any]:
        running = deque[Future[Any]]()
        for block in blocks:
            running.append(pool.submit(_score_in_worker, *block, keys))
            if len(running) > 2 * processes:  # so that few blocks are in memory
                yield running.popleft().result()
        while running:
            yield running.popleft().result()

    try:
        yield score
    except BrokenProcessPool:
        raise InputError(
            f"--nproc: {processes}, but one of these processes was killed, most often by the kernel's out-of-memory "
            f"killer: each needs memory for all tables; lower --nproc"
        ) from None
    except (KeyboardInterrupt, SystemExit):
        for process in active_children():
            process.kill()
        timeout_s = _CLOSING_S  # it never ends if a process was killed while it sent a result
        raise
    finally:
        closing = Thread(target=pool.shutdown, kwargs={"cancel_futures": True}, daemon=True)
        closing.start()
        closing.join(timeout_s)


def _begin_worker(checkpoint: Path, threads: int) -> None:
    global _scorer
    end_with_parent(os.getppid())
    if (parent := parent_process()) and not parent.is_alive():  # it had ended before
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which kills its processes
    import torch

    from dlrm_overlap.predict.scorer import Scorer

    torch.set_num_threads(threads)
    try:
        _scorer = Scorer(checkpoint)
    except InputError as error:  # a pool would only tell that this process has ended
        _scorer = error


def _score_in_worker(*arguments: Any) -> Any:
    if isinstance(_scorer, InputError):
        raise _scorer
    return _score(_scorer, *arguments)


def _score(scorer: Any, file: Path, row: int, block: Any, keys: list[str]) -> Any:
    """Return a table of the columns `keys` of `block` and the predictions, and the counts of `Encoder.take_counts`."""
    try:
        scores = scorer.score(block, row)
    except InputError as error:
        raise InputError(f"{file}: {error}; correct the file") from None
    table = pa.table({**{name: _readable(block.column(name)) for name in keys}, **scores})
    return table, *scorer.encoder.take_counts()


def _with_types(table: Any, schema: Any) -> Any:
    """Return the table with the types of the rows before it; an InputError if this would change a key's values."""
    for name, kind in zip(schema.names, schema.types, strict=True):
        column = table.column(name)
        column = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        same = column.type == kind or pa.types.is_null(column.type)
        with suppress(pa.ArrowException):
            same = same or column.cast(kind).cast(column.type).equals(column)
        if not same:
            types = ["bytes that are not UTF-8" if pa.types.is_binary(each) else each for each in (column.type, kind)]
            raise InputError(
                f"--key {name}: {types[0]}, but {types[1]} in earlier rows; give the column one type in all files, or "
                f"leave it out"
            )
    return table.cast(schema)


def _readable(column: Any) -> Any:
    """Return a column with text as text: cells of text files are read as bytes."""
    try:
        return column.cast(pa.string()) if pa.types.is_binary(column.type) else column
    except pa.ArrowInvalid:  # not UTF-8
        return column
