"""`dlrm-overlap eval`: predictions of a checkpoint for held-out samples, measured as a training run measures it.

The configuration is the one that the checkpoint keeps; options change its keys, and `--config FILE` takes its place.
Any number of ranks, backend and plan will do. Nothing is written but the file that `--output` names.
"""

from argparse import ArgumentError, ArgumentParser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_overlap.checkpoint.manifest import Manifest, differences, locate_checkpoint, read_manifest
from dlrm_overlap.config import Config, EmbeddingConfig, InputError, LogConfig, TrainConfig
from dlrm_overlap.launching.files import write_json
from dlrm_overlap.launching.parsing import Parser, read_tree, reader_may_leave
from dlrm_overlap.launching.text_table import count_of, plain
from dlrm_overlap.train.preflight import check_data, check_output, check_start
from dlrm_overlap.train.ranks import Ranks, run_on_ranks

if TYPE_CHECKING:
    from dlrm_overlap.data.batch import Dataset

_OPTION = "--checkpoint"


def run(argv: list[str], description: str) -> int:
    """Evaluate the checkpoint that `argv` names, on all ranks, and return the exit code.

    Raises:
        InputError: if there is no such checkpoint, if it is not whole, or if it is not one of the model that the
            configuration describes.
    """
    argv, named = _with_checkpoint(argv)
    if named is None and not {"-h", "--help"} & set(argv):
        raise InputError(f"{_OPTION}: nothing to evaluate; name a folder step_<N>, or that of a run")
    takes_stored = not any(option.partition("=")[0] == "--config" for option in argv)
    defaults = stored_config(named) if named and takes_stored else None

    def add_options(parser: Parser) -> None:
        text = "what to evaluate: a folder step_<N>, or that of a run, whose newest checkpoint is taken"
        parser.add_argument(_OPTION, metavar="PATH", help=text)
        parser.add_argument("--output", help="file to write the results to, as JSON")

    def check(config: Config, values: Any) -> None:
        check_data(config.data)
        if named and values.output is not None:
            check_output(Path(values.output))

    def work(ranks: Ranks) -> int:
        from dlrm_overlap.observe.result_files import nan_as_none

        assert named is not None, "--help has ended the process"
        results = evaluate(ranks, named)
        if ranks.world.rank == 0:
            with reader_may_leave():
                print(
                    f"step {results['step']}: AUROC {results['auroc']:.4f}, NE {results['ne']:.4f}, "
                    f"calibration {results['calibration']:.4f}, loss {results['loss']:.4f}, "
                    f"accuracy {results['accuracy']:.4f}, {count_of(results['samples'], 'sample')}"
                )
                for label in (key.removeprefix("auroc/") for key in results if key.startswith("auroc/")):
                    auroc, ne, calibration = (results[f"{key}/{label}"] for key in ("auroc", "ne", "calibration"))
                    print(f"{plain(label)}: AUROC {auroc:.4f}, NE {ne:.4f}, calibration {calibration:.4f}")
            if ranks.values.output is not None:
                write_json(Path(ranks.values.output), nan_as_none(results), "--output")
        return 0

    return run_on_ranks(["eval"], description, argv, work, add_options, check, defaults)


def evaluate(ranks: Ranks, path: Path) -> dict[str, Any]:
    """Return the `evaluation_metrics` of the checkpoint `path`, the number of samples, and how they were found.

    Raises:
        InputError: as `run` does; for a model that does not fit, before the process group is made.
    """
    from dlrm_overlap.checkpoint.checkpoint import agree_on
    from dlrm_overlap.data.loader import open_datasets
    from dlrm_overlap.train.stepping import Stepper

    config = for_evaluation(ranks.config)
    check_start(config, ranks.device)
    _, held_out = open_datasets(config.data, ranks.device)
    check_same_model(path, config, held_out)
    ranks.connect(eval_path=held_out.fingerprint())
    manifest = agree_on(path)
    if isinstance(manifest, str):
        raise InputError(f"{_OPTION}: {manifest}; evaluate another checkpoint")
    stepper = Stepper(config, ranks.world, ranks.device, held_out, held_out, progress=ranks.progress)
    values = stepper.evaluate_checkpoint(path)
    stepper.close()
    return {
        "checkpoint": str(path.absolute()),
        "step": manifest.step,
        **values,
        "samples": held_out.num_samples,
        "world_size": ranks.world.world_size,
        "global_batch_size": stepper.global_batch,
        "backend": config.embedding.backend,
        "device": ranks.device.type,
    }


def stored_config(path: Path) -> dict[str, Any]:
    """Return the configuration that the checkpoint `path` keeps, nested as in a file.

    Raises:
        InputError: if it keeps none, or one with keys that there are no longer.
    """
    manifest = _manifest(path)
    config = manifest.about.get("config")
    if not isinstance(config, dict):
        raise InputError(
            f"{_OPTION}: {path} keeps no configuration, as older ones do not; give that of its run by --config"
        )
    read_tree(config, Config, path)
    return config


def for_evaluation(config: Config) -> Config:
    """Return `config` without the keys of training alone: optimizers, traces, a compiled or captured dense part.

    None of it changes a prediction: evaluations in training, too, run the dense part kernel by kernel.
    """
    embedding = replace(config.embedding, optimizer="sgd", eps=EmbeddingConfig.eps)
    train = replace(config.train, optimizer="sgd", eps=TrainConfig.eps, steps=1, compile_dense=False, graph_dense=False)
    log = replace(config.log, trace_steps=0, trace_first=LogConfig.trace_first)
    return replace(config, embedding=embedding, train=train, log=log)


def check_same_model(path: Path, config: Config, data: "Dataset") -> None:
    """Check that the checkpoint `path` is one of the model of `config`, for the samples `data`.

    Raises:
        InputError: with every difference.
    """
    from dlrm_overlap.checkpoint.checkpoint import checkpoint_shape

    shape = checkpoint_shape(config, list(data.rows), data.dense_features)
    model = {key: shape[key] for key in shape if key.startswith("model.") or key in ("rows", "weight_dtype")}
    if parted := differences(_manifest(path), model):
        raise InputError(
            f"{_OPTION}: {path} has {parted}; leave --config and these keys out, which takes what it was trained with"
        )


def _with_checkpoint(argv: list[str]) -> tuple[list[str], Path | None]:
    """Return `argv` with the checkpoint that it names as the key `checkpoint.resume`, and that checkpoint.

    The ranks that --nproc starts are given the former, so all of them evaluate the same step of a run that goes on.
    """
    finder = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(_OPTION, f"{_OPTION}.resume", dest="path", type=Path)
    try:
        found, rest = finder.parse_known_args(argv)
    except ArgumentError:
        raise InputError(f"{_OPTION}: nothing is named; give a folder step_<N>, or that of a run") from None
    if found.path is None:
        return rest, None
    named = locate_checkpoint(found.path, _OPTION)
    return [*rest, f"{_OPTION}.resume={named}"], named


def _manifest(path: Path) -> Manifest:
    try:
        return read_manifest(path)
    except InputError as error:
        raise InputError(f"{_OPTION}: {error}; evaluate another checkpoint") from None
