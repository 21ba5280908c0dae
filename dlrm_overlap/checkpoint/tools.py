"""The command `checkpoint`: show and verify. It needs no process group and no GPU."""

from pathlib import Path

from dlrm_overlap.checkpoint.manifest import MANIFEST, is_checkpoint, read_manifest, read_whole
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.text_table import plain


def show(path: Path) -> str:
    """Return the manifest of the checkpoint `path`, in lines.

    Raises:
        InputError: if it is no checkpoint, or its manifest is damaged.
    """
    _check_named(path)
    manifest = read_manifest(path)
    about = manifest.about
    kinds = [table["sharding"] for table in about.get("plan", {}).values()]
    facts = {
        "step": manifest.step,
        "format": manifest.format,
        "ranks": about.get("world_size", "unknown"),
        "backend": about.get("config", {}).get("embedding", {}).get("backend", "unknown"),
        "plan": ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "unknown",
        **about.get("versions", {}),
        **manifest.metrics,
        **manifest.shape,
        **manifest.settings,
        **{f"file {name}": f"{size} bytes" for name, size in manifest.files.items()},
    }
    return "\n".join(plain(f"{key}: {value}") for key, value in facts.items())


def verify(path: Path) -> list[str]:
    """Return the faults of the checkpoint `path`, none if every tensor can be read and is finite.

    Raises:
        InputError: if it is no checkpoint.
    """
    _check_named(path)
    try:
        read_whole(path)
    except InputError as error:
        return [str(error)]
    from dlrm_overlap.checkpoint.storage import find_faults  # loads torch

    return find_faults(path)


def _check_named(path: Path) -> None:
    if not is_checkpoint(path):
        raise InputError(f"checkpoint: {path} is not a checkpoint, it has no {MANIFEST}; give a folder named step_<N>")
