"""How much of a trained mixture of experts each scheme keeps.

Its losses are larger than a dense model's: where a token's second and third expert are nearly equal, noise exchanges
them, so that even 8 bits have a divergence of thousandths of a nat. Perplexity rises as little as that of dense models.
"""

from typing import Any

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
@pytest.mark.parametrize(
    ("scheme", "better", "worse"),
    [
        ("mxfp4", {"mxfp4_scale": "mse"}, {"mxfp4_scale": "floor"}),
        ("mxfp4_weight_only", {"mxfp4_scale": "mse"}, {"mxfp4_scale": "floor"}),
        ("nvfp4_per_token", {"four_over_six": True}, {"four_over_six": False}),
        ("nvfp4_weight_only", {"four_over_six": True}, {"four_over_six": False}),
    ],
)
def test_rules_of_scales_on_16384_tokens(scheme: str, better: dict[str, Any], worse: dict[str, Any]):
    found = decoder(windows=128)
    losses = [found.measure({"quantization": scheme, **options}).divergence for options in (better, worse)]
    assert losses[0] <= losses[1], losses
