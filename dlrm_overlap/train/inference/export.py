"""Writes a checkpoint as a program of `torch.export`, and its signature beside it.

The program maps the features of a batch to click probabilities, in float32, on one device. The signature is a JSON file
with the names, types and shapes of inputs and output. docs/serving.md shows how to use both.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dlrm_overlap.checkpoint.manifest import Manifest, read_manifest
from dlrm_overlap.checkpoint.tools import verify
from dlrm_overlap.config import InputError
from dlrm_overlap.data.batch import table_keys
from dlrm_overlap.launching.files import replacing, write_json
from dlrm_overlap.train.inference.model import InferenceModel, Scratch, build_for_inference

_EXAMPLE_BATCH, _EXAMPLE_IDS = 5, 7  # of the batch that is traced; any other number of either will do later


def export_for_inference(path: Path, output: Path) -> dict[str, Any]:
    """Write the checkpoint `path` as a program for inference to `output`, and its signature beside it.

    Args:
        path: of the checkpoint, whose files are checked first.
        output: a new file that ends in .pt2; the signature has the same name with .json.

    Returns:
        The signature.

    Raises:
        InputError: if the checkpoint is not whole, or a file cannot be written or is there.
    """
    beside = output.with_suffix(".json")
    if output.suffix != ".pt2":
        raise InputError(f"export: {output} must end in .pt2, as programs of torch.export do")
    for file in (output, beside):
        if file.exists():
            raise InputError(f"export: {file} is there already; name a new file")
    if faults := verify(path):
        raise InputError(f"export: {faults[0]}; export another checkpoint")
    manifest = read_manifest(path)
    try:
        with TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
            model = build_for_inference(path, manifest, Scratch(Path(folder)))
            signature = _signature(model, manifest, output.name)
            program = trace(model, manifest.shape["model.dense_features"])
            with replacing(output) as stream:
                torch.export.save(program, stream)
        write_json(beside, signature, "export")
    except OSError as error:
        raise InputError(f"export: {output} cannot be written ({error.strerror}); name another file") from None
    return signature


def trace(model: InferenceModel, dense_features: int) -> torch.export.ExportedProgram:
    """Return `model` as a program for batches of any number of samples and ids."""
    tables, batch = len(model.tables), torch.export.Dim("batch")
    example = (
        torch.zeros(_EXAMPLE_BATCH, dense_features),
        [torch.zeros(_EXAMPLE_IDS, dtype=torch.int64) for _ in range(tables)],
        torch.ones(tables, _EXAMPLE_BATCH, dtype=torch.int64),
    )
    sizes = {
        "dense": {0: batch},
        "values": [{0: torch.export.Dim(f"ids_{t}")} for t in range(tables)],
        "lengths": {1: batch},
    }
    return torch.export.export(model, example, dynamic_shapes=sizes)


def _signature(model: InferenceModel, manifest: Manifest, name: str) -> dict[str, Any]:
    rows = manifest.shape["rows"]
    features = manifest.shape["model.dense_features"]
    tables = {key: {"rows": count} for key, count in zip(table_keys(len(rows)), rows, strict=True)}
    labels = manifest.shape["model.top_mlp"][-1]
    return {
        "program": name,
        "torch": torch.__version__,
        "step": manifest.step,
        "inputs": {
            "dense": {"dtype": "float32", "shape": ["batch", features]},
            "values": [{"table": key, "dtype": "int64", "shape": ["ids"]} for key in tables],
            "lengths": {"dtype": "int64", "shape": [len(rows), "batch"]},
        },
        "outputs": {"probability": {"dtype": "float32", "shape": ["batch", labels] if labels > 1 else ["batch"]}},
        "tables": tables,
        "bytes": sum(tensor.nbytes for tensor in model.state_dict().values()),
    }
