"""How much of a trained mixture of experts each scheme keeps.

Its losses are larger than a dense model's: where a token's second and third expert are nearly equal, noise exchanges
them, so that even 8 bits have a divergence of thousandths of a nat. Perplexity rises as little as that of dense models.
"""

import pytest
import torch
from moe_models import built
from quality import Decoder, Loss, assert_order, kind

from olq_fx.schemes import SCHEMES

# (kind, most that perplexity may rise, most that the logits may diverge in nats a token)
BOUNDS = {
    "8 bits, weights only": (0.002, 2e-3),
    "nvfp4, weights only": (0.006, 9e-3),
    "mxfp4, weights only": (0.006, 1e-2),
    "8 bits": (0.002, 5e-3),
    "nvfp4": (0.03, 2.7e-2),
    "mxfp4": (0.03, 3.2e-2),
}

WEIGHTS_ONLY = {
    "int8": "int8_per_channel_weight_only",
    "fp8_per_channel": "fp8_weight_only",
    "mxfp8": "mxfp8_weight_only",
    "mxfp4": "mxfp4_weight_only",
    "nvfp4_per_token": "nvfp4_weight_only",
}
SHORT = ("fp8_per_tensor", "int8", "int8_per_channel_weight_only", "mxfp4", "nvfp4_per_token")


def decoder(windows: int) -> Decoder:
    return Decoder(built("trained", "grouped_mm", torch.float32), windows)


def assert_bounds(measured: dict[str, Loss], slack: float) -> None:
    for scheme, loss in measured.items():
        most_rise, most_divergence = BOUNDS[kind(scheme)]
        assert loss.rise < most_rise + slack, (scheme, measured)
        assert 0 < loss.divergence < most_divergence, (scheme, measured)


def test_a_trained_mixture_keeps_its_quality():
    """On 512 tokens perplexity itself is noise of some tenths of a percent; divergences of logits are in order."""
    found = decoder(windows=4)
    measured = {scheme: found.measure(scheme) for scheme in SHORT}
    assert_bounds(measured, slack=0.02)
    eight = max(measured["fp8_per_tensor"].divergence, measured["int8"].divergence)
    assert measured["int8_per_channel_weight_only"].divergence < measured["int8"].divergence
    assert eight < measured["nvfp4_per_token"].divergence < 1.1 * measured["mxfp4"].divergence


@pytest.mark.slow
def test_every_scheme_on_16384_tokens():
    found = decoder(windows=128)
    measured = {scheme: found.measure(scheme) for scheme in SCHEMES}
    assert_bounds(measured, slack=0)
    assert_order(measured, "divergence")
    for both, alone in WEIGHTS_ONLY.items():
        assert measured[alone].divergence < measured[both].divergence, measured


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp4_weight_only"])
def test_mse_loses_no_more_than_floor_on_16384_tokens(scheme: str):
    found = decoder(windows=128)
    mse, floor = (found.measure({"quantization": scheme, "mxfp4_scale": rule}).divergence for rule in ("mse", "floor"))
    assert mse <= floor


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nvfp4_per_token", "nvfp4_weight_only"])
def test_four_over_six_loses_no_more_than_plain_nvfp4_on_16384_tokens(scheme: str):
    """Of the experts alone. With the layers of attention in nvfp4 too, which of the rules exchanges more of a token's
    experts is chance: weights are nearer by a sixth in mean square, and the divergence is 6.0e-3 against 5.0e-3
    (weights alone) and 1.77e-2 against 1.65e-2, where half of the text gives 5.0e-3 against 2.5e-3 for attention alone.
    """
    found = decoder(windows=128)
    better, plain = (found.measure({"moe": scheme, "four_over_six": rule}).divergence for rule in (True, False))
    assert better <= plain
