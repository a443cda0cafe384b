"""What is left alone by default, and why: one function a kind of layer, each returning its reason or "".

API:
    reason_for(place, outputs) -> str     the first reason that holds for a linear layer

Quality collapses when these are quantized with the rest (routers decide which expert runs, modulation scales every
channel of an image model); each is listed in the report with its reason and `include` opts it in.
"""

import dataclasses
import re
from collections.abc import Container

from torch import nn

COMPILED = "_orig_mod"
"""The name that `torch.compile(module)` gives to the module within; no part of the paths that people write."""

_OUTPUT_NAMES = frozenset({"lm_head", "embed_out", "output_projection"})
_ROUTER_CLASS = re.compile(r"(Router|RouterMLP|TopKGat(e|ing)|TopkGat(e|ing))$")
_GATE_CLASS = re.compile(r"Gat(e|ing)$")
_ROUTER_NAME = re.compile(r"router|shared_experts?_gate")
_EXPERTS = re.compile(r"(?!shared_)(\w+_)?experts")
_BESIDE_A_GATE = re.compile(r"(\w+_)?experts|shared_expert(_gate)?")
_MODULATION_CLASS = re.compile(r"AdaLayerNorm|AdaLN|AdaGroupNorm|AdaNorm|LayerNormZero|RMSNormZero|^Modulation$|FiLM")
_MODULATION_NAME = re.compile(r"(?i:ada_?ln\w*)|\w*scale_shift\w*")
_MODULATION_LAYER = re.compile(r"(\w+_)?modulation|(img|txt)_mod")
_INSIDE_MODULATION = re.compile(r"(\d+|lin|linear|fc|proj)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a module stands: its path, and the modules from the root (excluded) down to itself.

    Attributes:
        path: the module's path.
        chain: (name within the parent, module) of every level; empty for the root.
        root: the module at the top.
    """

    path: str
    chain: tuple[tuple[str, nn.Module], ...]
    root: nn.Module

    def of(self, leaf: str) -> str:
        """The path of a parameter of the module."""
        return f"{self.path}.{leaf}" if self.path else leaf

    def below(self, name: str, module: nn.Module) -> "Place":
        """The place of a child."""
        return Place(self.of(name), (*self.chain, (name, module)), self.root)

    @property
    def module(self) -> nn.Module:
        """The module that stands here."""
        return self.chain[-1][1] if self.chain else self.root

    @property
    def around(self) -> "Place":
        """The place of the parent; the root's is itself."""
        return Place(self.path.rpartition(".")[0], self.chain[:-1], self.root)

    def parent(self, level: int) -> nn.Module:
        """The module around the one at a level of the chain."""
        return self.chain[level - 1][1] if level else self.root


def reason_for(place: Place, outputs: Container[int]) -> str:
    """Why the weight of the linear layer at `place` is left alone by default; "" if it is not.

    Args:
        place: where the layer stands.
        outputs: identities of modules that models declare as their output embedding.
    """
    return _output_reason(place, outputs) or _router_reason(place) or _modulation_reason(place)


def in_experts(place: Place) -> bool:
    """Whether the module is one expert of a list or block of experts (shared experts are dense layers)."""
    return any(_EXPERTS.fullmatch(name) for name, _ in place.chain)


def holds_experts(place: Place) -> bool:
    """Whether the module's own parameters are the stacked weights of experts."""
    if re.search(r"Experts?(?![a-z])", type(place.module).__name__):
        return True
    return bool(place.chain) and _EXPERTS.fullmatch(place.chain[-1][0]) is not None


def _output_reason(place: Place, outputs: Container[int]) -> str:
    name = next((name for name, _ in reversed(place.chain) if name != COMPILED), "")
    if name in _OUTPUT_NAMES or id(place.module) in outputs:
        return "output embedding"
    return ""


def _router_reason(place: Place) -> str:
    """A router decides which expert runs. A bare `gate` is one only beside experts: elsewhere it is half of an MLP."""
    for level, (name, module) in enumerate(place.chain):
        kind = type(module).__name__
        if _ROUTER_CLASS.search(kind) or _ROUTER_NAME.fullmatch(name):
            return "router of a mixture of experts"
        if name == "gate" or _GATE_CLASS.search(kind):
            siblings = place.parent(level)._modules
            if "moe" in kind.lower() or any(_BESIDE_A_GATE.fullmatch(other) for other in siblings):
                return "router of a mixture of experts"
    return ""


def _modulation_reason(place: Place) -> str:
    """A modulation layer turns a timestep, a class or a text into scales and shifts of whole channels."""
    for level, (name, module) in enumerate(place.chain):
        inside = place.chain[level + 1][0] if level + 1 < len(place.chain) else ""
        if _MODULATION_CLASS.search(type(module).__name__) or _MODULATION_NAME.fullmatch(name):
            return "modulation layer"
        if _MODULATION_LAYER.fullmatch(name) and _INSIDE_MODULATION.fullmatch(inside):
            return "modulation layer"
        scale_shift = getattr(place.parent(level), "time_embedding_norm", None) == "scale_shift"
        if name == "time_emb_proj" and scale_shift:
            return "modulation layer"
    return ""
