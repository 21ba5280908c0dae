from collections.abc import Callable

import pytest
import torch

from dlrm_overlap.launching import supported_versions


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that these packages are installed, in these versions; None: not installed."""

    def install(cuda: str | None = None, **versions: str | None) -> None:
        named = {name.replace("_", "-"): version for name, version in versions.items()}
        real = supported_versions.version_of
        monkeypatch.setattr(supported_versions, "version_of", lambda name: named[name] if name in named else real(name))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        if named.get("torch"):
            monkeypatch.setattr(torch, "__version__", named["torch"])

    return install
