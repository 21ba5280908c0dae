"""`dlrm-overlap eval`: evaluates a checkpoint on held-out samples, with any number of ranks, backend and plan."""

import math
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm_overlap.checkpoint.manifest import HELD_OUT, differences, locate_checkpoint, read_manifest
from dlrm_overlap.checkpoint.pieces import DamagedError
from dlrm_overlap.config import EVAL_FRACTION, SELECTION, Config, EmbeddingConfig, FullPath, InputError, TrainConfig
from dlrm_overlap.launching.files import write_json
from dlrm_overlap.launching.parsing import Parser, read_tree
from dlrm_overlap.launching.text_table import count_of, format_table, plain
from dlrm_overlap.train.ranks import Ranks, check_data, check_output, check_start, run_on_ranks

_OPTION = "--checkpoint"
_COLUMNS = {"auroc": "AUROC", "ne": "NE", "calibration": "calibration"}
"""metric -> its title in tables"""


def run(argv: list[str], description: str) -> int:
    named = _named(argv)
    given = {option.partition("=")[0] for option in argv}
    defaults = stored_config(named) if named is not None and "--config" not in given else None
    if defaults and any(f"--data.{key}" in given for key in SELECTION):
        kept = {key: value for key, value in defaults.get("data", {}).items() if key not in SELECTION}
        defaults = {**defaults, "data": kept}  # the run's own selection would contradict the given one

    def add_options(parser: Parser) -> None:
        text = "folder step_<N> to evaluate, or a run's folder, for its newest checkpoint"
        parser.add_argument(_OPTION, type=FullPath, metavar="PATH", required=True, help=text)
        parser.add_argument("--output", type=FullPath, help="file to write the results to, as JSON")

    def check(config: Config, values: Any) -> None:
        check_data(config.data, "path" if config.data.eval_path is None else "eval_path")
        if values.output is not None:
            check_output(Path(values.output))

    def work(ranks: Ranks) -> int:
        from dlrm_overlap.observe.result_files import nan_as_none

        assert named is not None, "the option is required"
        results = evaluate(ranks, named)
        if ranks.world.rank == 0:
            print(
                f"step {results['step']}: AUROC {results['auroc']:.4f}, NE {results['ne']:.4f}, "
                f"calibration {results['calibration']:.4f}{means_of(results)}, loss {results['loss']:.4f}, "
                f"accuracy {results['accuracy']:.4f}, {count_of(results['samples'], 'sample')}"
            )
            if table := label_table(results):
                print(table)
            if found := results.get("windows"):
                print(_table("from", found, "samples"))
            if ranks.values.output is not None:
                write_json(Path(ranks.values.output), nan_as_none(results), "--output")
        return 0

    return run_on_ranks(["eval"], description, argv, work, add_options, check, defaults)


def means_of(values: Mapping[str, Any], prefix: str = "") -> str:
    """Return " (means of 2 labels)", or "" for one label. Keys of metrics begin with `prefix`."""
    labels = _labels(values, prefix)
    return f" (means of {len(labels)} labels)" if labels else ""


def label_table(values: Mapping[str, Any], prefix: str = "") -> str:
    """Return a table of the metrics of each label, or "" for one label. Keys of metrics begin with `prefix`."""
    labels = _labels(values, prefix)
    found = {label: {key: values.get(f"{prefix}{key}/{label}", math.nan) for key in _COLUMNS} for label in labels}
    return _table("label", found) if found else ""


def _labels(values: Mapping[str, Any], prefix: str) -> list[str]:
    return [key.removeprefix(f"{prefix}auroc/") for key in values if key.startswith(f"{prefix}auroc/")]


def _table(name: str, found: Mapping[str, Mapping[str, float]], *counts: str) -> str:
    lines = [[name, *counts, *_COLUMNS.values()]]
    for row, values in found.items():
        lines.append([plain(row), *(str(values[key]) for key in counts), *(f"{values[key]:.4f}" for key in _COLUMNS)])
    return format_table(lines)


def _named(argv: list[str]) -> Path | None:
    """Return the checkpoint that `argv` names, before the other options are parsed."""
    finder = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(_OPTION, nargs="?", type=Path)
    path = finder.parse_known_args(argv)[0].checkpoint
    return None if path is None else locate_checkpoint(path, _OPTION)


def evaluate(ranks: Ranks, path: Path) -> dict[str, Any]:
    """Return the `evaluation_metrics` of a checkpoint, the number of samples, and the setting; a collective.

    Raises:
        InputError: if the checkpoint is damaged, or does not fit the model or data. The fit is checked before the
            process group is made.
    """
    from dlrm_overlap.checkpoint.checkpoint import agree_on, checkpoint_shape, with_stored_rows
    from dlrm_overlap.comm.every_rank import gathered
    from dlrm_overlap.data.encoding import other_encoding
    from dlrm_overlap.data.loader import PREPARE_TOGETHER, open_datasets, other_ids
    from dlrm_overlap.train.stepping import StepRunner

    # Check that the checkpoint fits the data and the model.
    config = for_evaluation(ranks.config)
    check_start(config, ranks.device)
    _, held_out = open_datasets(config.data, ranks.device)
    shape = checkpoint_shape(config, list(held_out.rows), held_out.dense_features)
    model = {key: shape[key] for key in shape if key.startswith("model.") or key in ("rows", "weight_dtype")}
    stored, samples = read_manifest(path), config.data.eval_path or config.data.path
    made_by = f"the samples that {path} was trained with"
    if config.data.kind != "synthetic" and (
        other := other_encoding(str(samples), held_out.encoded, made_by, stored.encoding, path)
    ):
        raise InputError(f"{_OPTION}: {other}")
    if config.data.kind == "prepared" and (foreign := other_ids(shape["rows"], stored.shape.get("rows", []))):
        raise InputError(
            f"{_OPTION}: {samples} has {foreign} in {made_by}; unless data.tables.max_rows differs, {PREPARE_TOGETHER}"
        )
    if differing := differences(stored, model):
        raise InputError(f"{_OPTION}: {path} has {differing}; leave out --config and these keys to use its own")
    config.model.check_samples(len(held_out.rows), len(held_out.labels))
    # Load and evaluate on all ranks.
    group = ranks.connect(eval_path=held_out.fingerprint())
    path = gathered(path, group)[0]  # the run's newest checkpoint, which may be another one on a rank that looked later
    try:
        manifest = agree_on(path)
        config = with_stored_rows(config, manifest)
        runner = StepRunner(config, ranks.world, ranks.device, held_out, held_out, progress=ranks.progress)
        values = runner.evaluate_checkpoint(path)
    except DamagedError as error:
        raise InputError(f"{_OPTION}: {error}; evaluate another checkpoint") from None
    runner.close()
    return {
        "checkpoint": str(path.absolute()),
        "step": manifest.step,
        **values,
        **({"windows": runner.window_metrics} if runner.window_metrics else {}),
        "samples": held_out.num_samples,
        "world_size": ranks.world.world_size,
        "global_batch_size": runner.global_batch,
        "backend": runner.embedding.backend,
        "device": ranks.device.type,
    }


def stored_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a checkpoint, nested as in a file."""
    manifest = read_manifest(path)
    config = manifest.about.get("config", {})
    read_tree(config, Config, path)
    data = config.get("data", {})
    if HELD_OUT not in manifest.settings and data.get("eval_fraction") == EVAL_FRACTION:
        # The default of earlier versions, which did not replace what `prepare samples` held out.
        config = {**config, "data": {**data, "eval_fraction": None}}
    return config


def for_evaluation(config: Config) -> Config:
    """Return `config` without what changes no prediction: optimizers, compiled or captured parts, training samples."""
    data = replace(config.data, train_from=0)
    if data.eval_path is not None:
        data = replace(data, path=data.eval_path)
    embedding = replace(config.embedding, optimizer="sgd", eps=EmbeddingConfig.eps)
    train = replace(config.train, optimizer="sgd", eps=TrainConfig.eps, steps=1, compile_dense=False, graph_dense=False)
    return replace(config, data=data, embedding=embedding, train=train)
