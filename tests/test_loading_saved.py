"""`load_` of what `save` has written, and its cache."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import olq_fx
from olq_fx.errors import ConfigurationError, SavedModelError
from olq_fx.testing import assert_same_bits


def built() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)).eval()


def planned(scheme: str = "mxfp8") -> nn.Sequential:
    with torch.device("meta"):
        model = built()
    olq_fx.quantize_(model, scheme)
    return model


def checkpoint(path: Path) -> nn.Sequential:
    original = built()
    save_file(original.state_dict(), path)
    return original


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for (name, part), same in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert_same_bits(part, same, name=name)


@pytest.mark.parametrize("there", ["plain", "planned", "converted"])
def test_a_saved_model_is_mapped_back(there: str, tmp_path: Path):
    model = built()
    olq_fx.quantize_(model, "nvfp4_per_token")
    olq_fx.save(model, tmp_path / "saved")
    with torch.device("meta"):
        other = built()
    if there != "plain":
        other = planned("nvfp4_per_token")
    if there == "converted":
        other = built()
        olq_fx.quantize_(other, "nvfp4_per_token")
    report = olq_fx.load_(other, os.fspath(tmp_path / "saved"))
    assert report.converted == ("0.weight", "2.weight")
    assert sorted(report.loaded) == ["0.bias", "2.bias"]
    assert "saved by olq_fx" in str(report)
    assert_equal(other, model)
    x = torch.randn(3, 64)
    assert_same_bits(other(x), model(x))


def test_other_formats_and_dtypes_are_refused(tmp_path: Path):
    model = built()
    olq_fx.quantize_(model, "mxfp8")
    olq_fx.save(model, tmp_path / "saved")
    other = planned("int8")
    with pytest.raises(SavedModelError, match=r"0\.weight"):
        olq_fx.load_(other, tmp_path / "saved")
    assert other[0].weight.pending is not None
    with pytest.raises(ConfigurationError, match=r"dtype: .* is a saved model"):
        olq_fx.load_(planned(), tmp_path / "saved", dtype=torch.bfloat16)


def test_a_cache_gives_the_same_and_notices_a_change(tmp_path: Path):
    path, cache = tmp_path / "checkpoint.safetensors", tmp_path / "cache"
    checkpoint(path)
    first, second, other = planned(), planned(), planned("int8")
    assert "from the cache" not in olq_fx.load_(first, path, cache_dir=cache).source
    assert "from the cache" in olq_fx.load_(second, path, cache_dir=cache).source
    assert_equal(first, second)
    assert "from the cache" not in olq_fx.load_(other, path, cache_dir=cache).source
    changed = checkpoint(path)
    third = planned()
    assert "from the cache" not in olq_fx.load_(third, path, cache_dir=cache).source
    olq_fx.quantize_(changed, "mxfp8")
    assert_equal(third, changed)


def test_a_cache_needs_a_source_that_can_be_known_again(tmp_path: Path):
    state = built().state_dict()
    with pytest.raises(ConfigurationError, match="cache_dir goes with a source that is a file or directory"):
        olq_fx.load_(planned(), state, cache_dir=tmp_path)
