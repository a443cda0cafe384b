"""How much of a trained model's quality each scheme keeps: logits of a decoder, embeddings of an encoder.

The bounds are those of fake quantization in float32 of the same decoder with nothing of this library: weights alone
cost less than 0.1 % of perplexity in 8 bits, 0.08 % in nvfp4 and 0.2 % in mxfp4; with activations, several times that.
"""

import json
import pathlib

import pytest
import torch
from torch.nn.functional import cosine_similarity, cross_entropy

from olq_fx.schemes import SCHEMES

DATA = pathlib.Path(__file__).parents[1] / "data"

WINDOW = 128


def kind(scheme: str) -> str:
    formats = SCHEMES[scheme].linear
    element = next((name for name in ("nvfp4", "mxfp4") if name in formats.weight), "8 bits")
    return f"{element}, weights only" if formats.activation is None else element


# (kind, most that perplexity may rise, most that the logits may diverge in nats a token)
BOUNDS = {
    "8 bits, weights only": (0.0015, 2e-4),
    "nvfp4, weights only": (0.003, 2e-3),
    "mxfp4, weights only": (0.006, 4e-3),
    "8 bits": (0.004, 1e-3),
    "nvfp4": (0.02, 9e-3),
    "mxfp4": (0.03, 2e-2),
}


class Decoder:
    """The trained decoder, held-out text, and what the unquantized model makes of it."""

    def __init__(self, load, transformers, windows: int) -> None:
        self.case = load(None)
        self.case.model.eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(DATA / "tiny-qwen3-wiki"))
        text = "\n\n".join(json.loads((DATA / "wiki_val_texts.json").read_text()))
        self.tokens = torch.tensor(tokenizer(text)["input_ids"][: windows * WINDOW]).view(windows, WINDOW)
        self.original = self.logits(self.case.model)

    def logits(self, model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([model(input_ids=some, use_cache=False).logits for some in self.tokens.split(16)])

    def perplexity(self, logits: torch.Tensor) -> float:
        return float(cross_entropy(logits[:, :-1].flatten(0, 1), self.tokens[:, 1:].flatten()).exp())

    def measure(self, scheme: str) -> tuple[float, float]:
        """By how much perplexity rises, relatively, and the mean divergence of the logits."""
        quantized = self.case.fresh()
        quantized.quantize(scheme)
        logits = self.logits(quantized.model)
        rise = self.perplexity(logits) / self.perplexity(self.original) - 1
        before, after = self.original.log_softmax(-1), logits.log_softmax(-1)
        return rise, float((before.exp() * (before - after)).sum(-1).mean())


def assert_order(measured: dict[str, tuple[float, float]], index: int) -> None:
    """8 bits lose less than nvfp4 and that less than mxfp4, with and without quantized activations."""
    for suffix in ("", ", weights only"):
        eight, nvfp4, mxfp4 = (
            [values[index] for scheme, values in measured.items() if kind(scheme) == name + suffix]
            for name in ("8 bits", "nvfp4", "mxfp4")
        )
        assert max(eight) < min(nvfp4), measured
        assert max(nvfp4) < min(mxfp4), measured


def test_a_trained_decoder_keeps_its_quality(load_trained_qwen3, transformers_module):
    decoder = Decoder(load_trained_qwen3, transformers_module, windows=12)
    measured = {scheme: decoder.measure(scheme) for scheme in SCHEMES}
    for scheme, (rise, divergence) in measured.items():
        assert abs(rise) < BOUNDS[kind(scheme)][0] + 0.002, (scheme, measured)
        assert divergence < BOUNDS[kind(scheme)][1], (scheme, measured)
    assert_order(measured, index=1)


@pytest.mark.slow
def test_perplexity_of_a_trained_decoder_on_more_text(load_trained_qwen3, transformers_module):
    """On 16384 tokens the differences of perplexity itself are larger than its noise."""
    decoder = Decoder(load_trained_qwen3, transformers_module, windows=128)
    measured = {scheme: decoder.measure(scheme) for scheme in SCHEMES}
    for scheme, (rise, divergence) in measured.items():
        assert rise < BOUNDS[kind(scheme)][0], (scheme, measured)
        assert divergence < BOUNDS[kind(scheme)][1], (scheme, measured)
    assert_order(measured, index=0)
    assert_order(measured, index=1)


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
