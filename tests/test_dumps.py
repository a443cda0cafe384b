"""Dumps of all passes, those on aten operators too, where an argument or the environment names a folder."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import olq_fx
from olq_fx.dynamo import DUMP
from olq_fx.passes import pipeline


class Normed(nn.Module):
    """A norm and a quantization after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.norm(x))
        return found


def compiled(gradient: bool = False, **options: object) -> None:
    x = torch.randn(3, 64, requires_grad=gradient)
    with torch.set_grad_enabled(gradient):
        result = torch.compile(Normed(), backend=olq_fx.backend("mxfp8", **options))(x)
    if gradient:
        result.sum().backward()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_late_passes_are_dumped_after_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(DUMP, str(tmp_path / "unused"))
    compiled(dump_dir=tmp_path / "used")
    assert names(tmp_path) == ["used"]
    graph = tmp_path / "used" / "graph_001"
    assert len(names(graph)) == len(pipeline.PASSES) + 2
    late = graph / "late_1"
    expected = ["before", *(make.name for make in pipeline.LATE_PASSES), "decompose"]
    assert names(late) == [f"{number:02}_{name}.txt" for number, name in enumerate(expected)]
    last = (late / f"{len(expected) - 1:02}_decompose.txt").read_text()
    assert last.startswith("# decompose: 1 places changed\n#")
    assert "#    -1 olq_fx.quantize.default\n" in last


def test_a_backward_has_a_folder_of_its_own(tmp_path: Path):
    compiled(gradient=True, dump_dir=tmp_path)
    assert {"late_1", "late_2"} <= set(names(tmp_path / "graph_001"))


def test_the_environment_names_a_folder_in_which_each_backend_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(DUMP, f" {tmp_path / 'there'} ")
    for _ in range(2):
        compiled(inner="eager")
        torch.compiler.reset()
    first, second = names(tmp_path / "there")
    assert first.startswith(f"process_{os.getpid()}_backend_")
    assert names(tmp_path / "there" / first) == names(tmp_path / "there" / second) == ["graph_001"]


def test_without_either_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DUMP, " ")
    compiled(inner="eager")
    assert names(tmp_path) == []
