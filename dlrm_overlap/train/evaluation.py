"""`dlrm-overlap eval`: predictions of a checkpoint for held-out samples, measured as a training run measures it.

The configuration is the one that the checkpoint keeps; options change its keys, and `--config FILE` takes its place.
Any number of ranks, backend and plan will do. Nothing is written but the file that `--output` names.
"""

import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dlrm_overlap.checkpoint.storage.branches import locate_checkpoint
from dlrm_overlap.checkpoint.storage.manifest import DamagedError, Manifest, read_manifest
from dlrm_overlap.config import Config, EmbeddingConfig, InputError, LogConfig, TrainConfig
from dlrm_overlap.launching.files import write_json
from dlrm_overlap.launching.parsing import Parser, read_tree, reader_may_leave
from dlrm_overlap.launching.text_table import count_of, plain
from dlrm_overlap.train.preflight import check_data, check_start, check_writable
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
        text = "evaluate, in one process, what checkpoint export --format inference makes of it with this --quantize"
        parser.add_argument("--exported_as", choices=["none", "int8"], help=text)
        parser.add_argument("--output", help="file to write the results to, as JSON")

    def check(config: Config, values: Any) -> None:
        check_data(config.data)
        if named and values.output is not None:
            _check_output(Path(values.output), named)
        if values.exported_as is not None and values.nproc not in (None, 1):
            raise _one_process(values.exported_as)

    def work(ranks: Ranks) -> int:
        from dlrm_overlap.observe.result_files import nan_as_none

        assert named is not None, "--help has ended the process"
        quantize = ranks.values.exported_as
        results = evaluate(ranks, named) if quantize is None else evaluate_exported(ranks, named, quantize)
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
    from dlrm_overlap.checkpoint.storage.load import agree_on
    from dlrm_overlap.data.loader import open_held_out
    from dlrm_overlap.train.stepping import Stepper

    config = for_evaluation(ranks.config)
    check_start(config, ranks.device)
    held_out = open_held_out(config.data, ranks.device)
    check_same_model(path, config, held_out)
    ranks.connect(eval_path=held_out.fingerprint())
    manifest, faults = agree_on(path, ranks.progress.tick)
    step = _step_if_whole(manifest, faults)
    stepper = Stepper(config, ranks.world, ranks.device, held_out, held_out, progress=ranks.progress)
    values = stepper.evaluate_checkpoint(path)
    stepper.close()
    return {
        "checkpoint": str(path.absolute()),
        "step": step,
        **values,
        "samples": held_out.num_samples,
        "world_size": ranks.world.world_size,
        "global_batch_size": stepper.global_batch,
        "backend": config.embedding.backend,
        "device": ranks.device.type,
    }


def evaluate_exported(ranks: Ranks, path: Path, quantize: str) -> dict[str, Any]:
    """Return the results of `evaluate`, but of the export that `train.inference.export` makes of the checkpoint `path`.

    Raises:
        InputError: as `evaluate` does, and on several ranks.
    """
    import torch

    from dlrm_overlap.checkpoint.storage.load import find_faults
    from dlrm_overlap.data.loader import make_loader, open_held_out
    from dlrm_overlap.observe.metrics import evaluation_metrics
    from dlrm_overlap.train.inference.model import Scratch, build_for_inference

    config, batch_size = ranks.config, ranks.config.train.samples_per_rank(1)
    if ranks.world.world_size > 1:
        raise _one_process(quantize)
    held_out = open_held_out(config.data, ranks.device)
    check_same_model(path, config, held_out)
    ranks.connect()
    manifest = _manifest(path)
    step = _step_if_whole(manifest, find_faults(path, manifest))
    samples = held_out.num_samples
    assert samples is not None, "an endless data set cannot be evaluated"
    logits, labels = [], []
    with TemporaryDirectory() as folder:
        try:
            model, squares = build_for_inference(path, manifest, quantize, Scratch(Path(folder)))
        except OSError as error:
            raise InputError(
                f"--exported_as: a table cannot be written to {folder} ({error.strerror}); set TMPDIR to a folder with "
                f"room for the tables"
            ) from None
        model = model.to(ranks.device)
        steps, prefetch = math.ceil(samples / batch_size), config.data.prefetch
        with torch.no_grad(), make_loader(held_out, batch_size, 0, 1, 0, steps, 0, prefetch, False) as loader:
            for batch in loader:
                batch = batch.to(ranks.device)
                lengths = batch.sparse.lengths().view(len(held_out.rows), -1).long()
                values = list(batch.sparse.values().long().split(lengths.sum(1).tolist()))
                logits.append(model.logits(batch.dense, values, lengths))
                labels.append(batch.labels)
    return {
        "checkpoint": str(path.absolute()),
        "step": step,
        **evaluation_metrics(
            torch.cat(logits)[:samples], torch.cat(labels)[:samples], held_out.label_names, held_out.label_weights
        ),
        "samples": samples,
        "exported_as": quantize,
        "relative_rms_error_of_weights": squares.relative_rms_error,
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


def _one_process(quantize: str) -> InputError:
    return InputError(f"--exported_as: {quantize} is evaluated by one process; leave --nproc out")


def _step_if_whole(manifest: Manifest | None, faults: list[str]) -> int:
    if manifest is None or faults:
        raise InputError(f"{_OPTION}: {faults[0]}; evaluate another checkpoint")
    return manifest.step


def check_same_model(path: Path, config: Config, data: "Dataset") -> None:
    """Check that the checkpoint `path` is one of the model of `config`, for the samples `data`.

    Raises:
        InputError: with every difference.
    """
    from dlrm_overlap.checkpoint.checkpoint import checkpoint_shape
    from dlrm_overlap.checkpoint.storage.fits import differences

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
    rest, named = [], None
    options = iter(argv)
    for option in options:
        name, _, value = option.partition("=")
        if name not in (_OPTION, f"{_OPTION}.resume"):
            rest.append(option)
            continue
        value = value or next(options, "")
        if not value or value.startswith("--"):
            raise InputError(f"{name}: nothing is named; give a folder step_<N>, or that of a run")
        named = locate_checkpoint(Path(value), _OPTION)
    return [*rest, *([f"{_OPTION}.resume={named}"] if named else [])], named


def _check_output(path: Path, checkpoint: Path) -> None:
    folder = checkpoint.resolve().parent
    run_folder = folder.parent if folder.name == "checkpoints" else checkpoint.resolve()
    if path.resolve().is_relative_to(run_folder):
        raise InputError(f"--output: {path} is in the run's folder, which an evaluation leaves alone; name another")
    if path.is_dir():
        raise InputError(f"--output: {path} is a folder; name a file, say {path / 'eval.json'}")
    check_writable(path.parent, "--output")


def _manifest(path: Path) -> Manifest:
    try:
        return read_manifest(path)
    except DamagedError as error:
        raise InputError(f"{_OPTION}: {error}; evaluate another checkpoint") from None
