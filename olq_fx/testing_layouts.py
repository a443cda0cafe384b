"""Large language models on meta: the module tree of a published size, without values and in little memory.

API:
    decoder_layout(layers, hidden, inner, experts=0, stacked=False) -> nn.Module
    LLAMA_70B, MOE_235B                the arguments of two published sizes
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

VOCABULARY = 150_000

LLAMA_70B: Mapping[str, int] = MappingProxyType({"layers": 80, "hidden": 8192, "inner": 28672})
"""The sizes of Llama 3 70B (its key and value projections as wide as the others)."""

MOE_235B: Mapping[str, int] = MappingProxyType({"layers": 94, "hidden": 4096, "inner": 1536, "experts": 128})
"""The sizes of Qwen3 235B-A22B, whose experts are 36,096 linear layers when each is a layer of its own."""


class StackedExperts(nn.Module):
    """Experts as three-dimensional parameters: (experts, 2 * inner, hidden) and (experts, hidden, inner)."""

    def __init__(self, hidden: int, inner: int, count: int) -> None:
        """Make parameters without values."""
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))


class _Bare(nn.Linear):
    """A linear layer that is made quickly: most of the time goes into values that nobody reads."""

    def reset_parameters(self) -> None:
        """Leave the weight without values."""


def decoder_layout(layers: int, hidden: int, inner: int, experts: int = 0, stacked: bool = False) -> nn.Module:
    """The modules of a decoder under the names of Hugging Face, bfloat16, on meta. It has no forward.

    Args:
        layers: how many blocks.
        hidden: the width between the blocks.
        inner: the width within the MLP, or within each expert.
        experts: how many experts a block has; 0 for a dense model.
        stacked: whether the experts are three-dimensional parameters instead of modules.
    """

    def block() -> nn.Module:
        attention = nn.ModuleDict({f"{name}_proj": _linear(hidden, hidden) for name in "qkvo"})
        feed: nn.Module = _mlp(hidden, inner)
        if experts:
            inside: nn.Module
            if stacked:
                inside = StackedExperts(hidden, inner, experts)
            else:
                inside = nn.ModuleList(_mlp(hidden, inner) for _ in range(experts))
            feed = nn.ModuleDict({"gate": _linear(hidden, experts), "experts": inside})
        return nn.ModuleDict({"self_attn": attention, "mlp": feed, "norm": nn.RMSNorm(hidden)})

    with torch.device("meta"):
        body = nn.ModuleDict({"embed_tokens": nn.Embedding(VOCABULARY, hidden)})
        body["layers"] = nn.ModuleList(block() for _ in range(layers))
        return nn.ModuleDict({"model": body, "lm_head": _linear(hidden, VOCABULARY)}).bfloat16()


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return _Bare(inputs, outputs, bias=False, device="meta", dtype=torch.bfloat16)


def _mlp(hidden: int, inner: int) -> nn.Module:
    sides = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return nn.ModuleDict({name: _linear(*side) for name, side in sides.items()})
