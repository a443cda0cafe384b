"""How much of a trained decoder's quality a configuration keeps, on held-out text."""

import copy
import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import olq_fx
from olq_fx.optional_packages import load_transformers
from olq_fx.schemes import SCHEMES

DATA = pathlib.Path(__file__).parents[1] / "data"
WINDOW = 128
BATCH = 16
KINDS = ("8 bits", "nvfp4", "mxfp4")


def kind(scheme: str) -> str:
    """One of `KINDS`, and whether only weights are quantized."""
    formats = SCHEMES[scheme].linear
    element = next((name for name in ("nvfp4", "mxfp4") if name in formats.weight), "8 bits")
    return f"{element}, weights only" if formats.activation is None else element


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """What a quantized model loses.

    Attributes:
        rise: of perplexity, relative to the original's.
        divergence: the mean divergence of the logits in nats a token.
    """

    rise: float
    divergence: float


class Decoder:
    """A trained decoder, held-out text, and what the unquantized model makes of it."""

    def __init__(self, model: Any, windows: int) -> None:
        self.model = model.eval()
        tokenizer = load_transformers().AutoTokenizer.from_pretrained(str(DATA / "tiny-qwen3-wiki"))
        text = "\n\n".join(json.loads((DATA / "wiki_val_texts.json").read_text()))
        self.tokens = torch.tensor(tokenizer(text)["input_ids"][: windows * WINDOW]).view(windows, WINDOW)
        self.original = [self.logits(self.model, some) for some in self.tokens.split(BATCH)]

    def logits(self, model: Any, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(input_ids=tokens, use_cache=False).logits
        return found

    def nats(self, logits: Tensor, tokens: Tensor) -> float:
        """The sum over all tokens but the first of each window."""
        return float(cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"))

    def measure(self, config: Any) -> Loss:
        """What a copy of the model loses, quantized by a configuration."""
        quantized = copy.deepcopy(self.model)
        olq_fx.quantize_(quantized, config)
        nats = divergence = 0.0
        for tokens, original in zip(self.tokens.split(BATCH), self.original, strict=True):
            logits = self.logits(quantized, tokens)
            nats += self.nats(logits, tokens) - self.nats(original, tokens)
            before, after = original.log_softmax(-1), logits.log_softmax(-1)
            divergence += float((before.exp() * (before - after)).sum())
        rise = torch.tensor(nats / (self.tokens.numel() - len(self.tokens))).expm1()
        return Loss(float(rise), divergence / self.tokens.numel())


def assert_order(measured: Mapping[str, Loss], what: str) -> None:
    """8 bits lose less than nvfp4 and that less than mxfp4, with and without quantized activations.

    Args:
        measured: by scheme.
        what: the attribute of `Loss` that is compared.
    """
    for suffix in ("", ", weights only"):
        eight, nvfp4, mxfp4 = (
            [getattr(loss, what) for scheme, loss in measured.items() if kind(scheme) == name + suffix]
            for name in KINDS
        )
        assert max(eight) < min(nvfp4), measured
        assert max(nvfp4) < min(mxfp4), measured
