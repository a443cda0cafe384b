"""Weights that are cut over two processes: tensor parallelism, FSDP2, checkpoints of other cuts."""

from pathlib import Path

import pytest
from distributed_checks import FEW, everything
from two_processes import in_two_processes

from olq_fx.schemes import SCHEMES


def test_two_processes(tmp_path: Path):
    in_two_processes(everything, tmp_path, str(tmp_path), FEW)


@pytest.mark.slow
def test_every_scheme_in_two_processes(tmp_path: Path):
    in_two_processes(everything, tmp_path, str(tmp_path), tuple(SCHEMES))
