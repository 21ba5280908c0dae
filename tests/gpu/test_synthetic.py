import pytest

from tests.gpu import synthetic


@pytest.mark.gpu
def test_samples_are_those_of_the_cpu() -> None:
    assert synthetic.main() == 0
