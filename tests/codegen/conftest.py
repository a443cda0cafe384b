"""The processes that emit, compile and run code for a GPU that is not there; each file of tests has its own."""

from collections.abc import Iterator

import pytest

from olq_fx.testing import Compiler, Emitter, Interpreter


@pytest.fixture(scope="module")
def emitter() -> Iterator[Emitter]:
    with Emitter(timeout=600) as process:
        yield process


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    with Compiler(timeout=300) as process:
        yield process


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter(timeout=600) as process:
        yield process
