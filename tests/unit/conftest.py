"""What several unit tests of the C kernels share."""

from collections.abc import Iterator

import pytest

from llamarium.kernels import native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernels" in metafunc.fixturenames:
        metafunc.parametrize("kernels", available(), indirect=True)


def available() -> list[str]:
    lib = native.library()
    assert lib is not None, "the suite wants the kernels: a C compiler, and `make native`"
    found = [name for name in native.KERNELS if lib.lm_use_kernels(name.encode()) == 0]
    lib.lm_use_kernels(None)
    return found


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each set of kernels that this machine has."""
    lib = native.library()
    assert lib is not None
    lib.lm_use_kernels(request.param.encode())
    yield request.param
    lib.lm_use_kernels(None)
