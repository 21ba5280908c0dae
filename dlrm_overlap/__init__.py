"""DLRM training whose embedding exchange overlaps with the rest of the step."""


def __getattr__(name: str) -> str:
    """Return `__version__`, looked up when it is asked for."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("dlrm-overlap")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        import tomllib
        from pathlib import Path

        project = Path(__file__).resolve().parents[1] / "pyproject.toml"
        return tomllib.loads(project.read_text())["project"]["version"]
