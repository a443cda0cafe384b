"""Tests in this folder have the marker `gpu`: they need a CUDA device, and are skipped with that reason without one."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))


@pytest.fixture(scope="session")
def native() -> bool:
    """Whether the GPU casts to float8."""
    return torch.cuda.get_device_capability() >= (8, 9)
