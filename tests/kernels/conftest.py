"""One interpreter for all tests of Triton kernels of a process."""

from collections.abc import Iterator

import pytest

from olq_fx.testing import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as started:
        yield started
