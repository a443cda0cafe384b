"""What is saved loads in transformers with compressed-tensors, and gives the same weights and logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from olq_fx.quantize import quantize_
from olq_fx.saving import save
from olq_fx.schemes import SCHEMES
from olq_fx.weights import QuantizedWeight

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

FOLDER = Path(__file__).parent / "data" / "tiny-qwen3-wiki"
DEFAULT = ("int8", "fp8_per_block", "mxfp4", "nvfp4_per_token")
"""One of each family; the others take the same ways."""

READABLE = [name for name in SCHEMES if name != "mxfp4_dualscale"]
MX = ("mxfp8", "mxfp8_weight_only", "mxfp4", "mxfp4_weight_only", "nvfp4_per_token", "nvfp4_weight_only")
"""Their decompressed weights are bfloat16 whatever the model is, so that a float32 model does not run."""


def load(path: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@pytest.mark.parametrize(
    "scheme", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in READABLE]
)
def test_compressed_tensors_reads_it(scheme: str, tmp_path: Path):
    dtype = torch.bfloat16 if scheme in MX else torch.float32
    ids = torch.arange(5, 37)[None]
    model = load(FOLDER, dtype)
    with torch.no_grad():
        original = model(ids).logits.float()
    quantize_(model, scheme)
    saved = save(model, tmp_path / "out")
    assert saved.readable
    assert bool(saved.differences) == (scheme == "nvfp4_per_token")
    theirs = load(tmp_path / "out", dtype)
    with torch.no_grad():
        expected, found = model(ids).logits.float(), theirs(ids).logits.float()
    weights = [(path, p) for path, p in model.named_parameters() if isinstance(p, QuantizedWeight)]
    assert len(weights) == 28
    for path, weight in weights:
        ours, decompressed = weight.dequantize(torch.float32), theirs.get_parameter(path).float()
        if scheme in MX and scheme.startswith("nvfp4"):
            # The scale divided by G, and its product with the code, are rounded to bfloat16: 2^-9 each.
            assert ((decompressed - ours).abs() <= 2**-7.9 * ours.abs()).all(), path
        else:
            assert torch.equal(decompressed, ours), path
    distance, noise = (found - expected).norm(), (expected - original).norm()
    if scheme in ("mxfp8", "mxfp8_weight_only", "mxfp4", "mxfp4_weight_only"):
        assert torch.equal(found, expected)
    elif scheme in ("int8_per_channel_weight_only", "fp8_weight_only"):
        assert distance <= 1e-5 * expected.norm()  # sums of float32 in another order
    else:
        # Two roundings of the same activations by rules of their own: no farther apart than each from the original.
        assert distance <= 2**0.5 * noise


def test_what_it_cannot_read_is_said(tmp_path: Path):
    model = load(FOLDER, torch.bfloat16)
    quantize_(model, "mxfp4_dualscale")
    saved = save(model, tmp_path / "out")
    assert not saved.readable
    assert "cannot read the format mxfp4_dualscale" in str(saved)
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["quantization_config"]["quant_method"] == "olq_fx"
