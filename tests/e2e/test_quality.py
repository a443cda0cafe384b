"""How much of a trained model's quality each scheme keeps: logits of a decoder, embeddings of an encoder.

The bounds are those of fake quantization in float32 of the same decoder with nothing of this library: weights alone
cost less than 0.1 % of perplexity in 8 bits, 0.08 % in nvfp4 and 0.2 % in mxfp4; with activations, several times that.
"""

import pytest
import torch
from quality import Decoder, assert_order, kind
from torch.nn.functional import cosine_similarity

from olq_fx.schemes import SCHEMES

# (kind, most that perplexity may rise, most that the logits may diverge in nats a token)
BOUNDS = {
    "8 bits, weights only": (0.0015, 2e-4),
    "nvfp4, weights only": (0.003, 2e-3),
    "mxfp4, weights only": (0.006, 4e-3),
    "8 bits": (0.004, 1e-3),
    "nvfp4": (0.02, 9e-3),
    "mxfp4": (0.03, 2e-2),
}


def test_a_trained_decoder_keeps_its_quality(load_trained_qwen3):
    decoder = Decoder(load_trained_qwen3(None).model, windows=12)
    measured = {scheme: decoder.measure(scheme) for scheme in SCHEMES}
    for scheme, loss in measured.items():
        assert abs(loss.rise) < BOUNDS[kind(scheme)][0] + 0.002, (scheme, measured)
        assert loss.divergence < BOUNDS[kind(scheme)][1], (scheme, measured)
    assert_order(measured, "divergence")


@pytest.mark.slow
def test_perplexity_of_a_trained_decoder_on_more_text(load_trained_qwen3):
    """On 16384 tokens the differences of perplexity itself are larger than its noise."""
    decoder = Decoder(load_trained_qwen3(None).model, windows=128)
    measured = {scheme: decoder.measure(scheme) for scheme in SCHEMES}
    for scheme, loss in measured.items():
        assert loss.rise < BOUNDS[kind(scheme)][0], (scheme, measured)
        assert loss.divergence < BOUNDS[kind(scheme)][1], (scheme, measured)
    assert_order(measured, "rise")
    assert_order(measured, "divergence")


def test_a_trained_encoder_keeps_its_embeddings(load_minilm):
    """All six layers of MiniLM: the mean cosine of its sentence embeddings to the original's, by scheme."""
    case = load_minilm(None)
    case.model.eval()
    mask = case.kwargs["attention_mask"][..., None]

    def embeddings(run) -> torch.Tensor:
        return (case.call(run) * mask).sum(1) / mask.sum(1)

    original = embeddings(case.model)
    measured = {}
    for scheme in SCHEMES:
        quantized = case.fresh()
        report = quantized.quantize(scheme)
        assert report.converted == case.weights
        assert len(report.converted) == 6 * 6 + 1
        cosines = cosine_similarity(embeddings(quantized.model), original)
        measured[scheme] = float(cosines.mean())
        assert measured[scheme] > (0.995 if kind(scheme).startswith("8 bits") else 0.93), measured
    assert min(v for k, v in measured.items() if kind(k).startswith("8 bits")) > max(
        v for k, v in measured.items() if kind(k) in ("nvfp4", "mxfp4")
    )
