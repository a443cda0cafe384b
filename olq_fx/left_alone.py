"""What is left alone by default, and why: where a layer stands tells what it is for.

API:
    Place.root(model), place.below(name, module)     a module and what its path says of it, walked from the top
    reason_for(place, outputs) -> str                why a linear layer there is left alone, or ""
    in_experts(place), holds_experts(place)          whether a layer, or a bare parameter, is of experts

Quality collapses when these are quantized with the rest (routers decide which expert runs, modulation scales every
channel of an image model); each is listed in the report with its reason and `include` opts it in.
"""

import dataclasses
import functools
import re
from collections.abc import Container

from torch import nn

COMPILED = "_orig_mod"
"""The name that `torch.compile(module)` gives to the module within; no part of the paths that people write."""

_OUTPUT_NAMES = frozenset({"lm_head", "embed_out", "output_projection"})
_ROUTER_CLASS = re.compile(r"(Router|RouterMLP|Top[kK]Gat(e|ing))$")
_ROUTER_NAME = re.compile(r"router|shared_experts?_gate")
_GATE_CLASS = re.compile(r"Gat(e|ing)$")
_BESIDE_A_GATE = re.compile(r"(\w+_)?experts|shared_expert(_gate)?")
_EXPERTS_CLASS = re.compile(r"Experts?(?![a-z])")
_EXPERTS_NAME = re.compile(r"(?!shared_)(\w+_)?experts")
_MODULATION_CLASS = re.compile(r"AdaLayerNorm|AdaLN|AdaGroupNorm|AdaNorm|LayerNormZero|RMSNormZero|^Modulation$|FiLM")
_MODULATION_NAME = re.compile(r"(?i:ada_?ln\w*)|\w*scale_shift\w*")
_MODULATION_LAYER = re.compile(r"(\w+_)?modulation|(img|txt)_mod")
_INSIDE_MODULATION = re.compile(r"\d+|lin|linear|fc|proj")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a module stands, and what its path says of it.

    Attributes:
        path: the module's path; "" for the root.
        name: its name within the parent, the mark of `torch.compile` aside.
        module: the module.
        parent: the place around it; None for the root.
        experts: whether it is a list or block of experts, or inside one.
        router: whether it is a router of experts, or inside one.
        modulation: whether it is a modulation layer, or inside one.
    """

    path: str
    name: str
    module: nn.Module
    parent: "Place | None" = None
    experts: bool = False
    router: bool = False
    modulation: bool = False

    @classmethod
    def root(cls, model: nn.Module) -> "Place":
        """The place of the model itself, whose own class says nothing."""
        return cls("", "", model)

    def of(self, leaf: str) -> str:
        """The path of a parameter of the module."""
        return f"{self.path}.{leaf}" if self.path else leaf

    def below(self, name: str, module: nn.Module) -> "Place":
        """The place of a child."""
        kind = type(module).__name__
        experts, router, modulation = _said_by(name, kind)
        return Place(
            f"{self.path}.{name}" if self.path else name,
            self.name if name == COMPILED else name,
            module,
            self,
            self.experts or experts,
            self.router or (self._routes(name, kind) if router is None else router),
            self.modulation or (self._modulates(name) if modulation is None else modulation),
        )

    def within(self, module: nn.Module) -> bool:
        """Whether `module` is this one or one around it."""
        place: Place | None = self
        while place is not None:
            if place.module is module:
                return True
            place = place.parent
        return False

    def _routes(self, name: str, kind: str) -> bool:
        """Whether a `gate` is a router. It is one only beside experts: elsewhere it is half of an MLP."""
        return "moe" in kind.lower() or any(_matches(_BESIDE_A_GATE, other) for other in self.module._modules)

    def _modulates(self, name: str) -> bool:
        """Whether a child turns a timestep, a class or a text into scales and shifts of whole channels.

        `modulation` itself is a name of other things too (FocalNet): only what is directly in it counts.
        """
        if name == "time_emb_proj":
            return getattr(self.module, "time_embedding_norm", None) == "scale_shift"
        return _matches(_MODULATION_LAYER, self.name) and _matches(_INSIDE_MODULATION, name)


@functools.cache
def _said_by(name: str, kind: str) -> tuple[bool, bool | None, bool | None]:
    """Whether a child of this name and class is of experts, a router, a modulation; None: what is around it tells."""
    router: bool | None = _found(_ROUTER_CLASS, kind) or _matches(_ROUTER_NAME, name)
    if not router and (name == "gate" or _found(_GATE_CLASS, kind)):
        router = None
    modulation: bool | None = _found(_MODULATION_CLASS, kind) or _matches(_MODULATION_NAME, name)
    if not modulation and (name == "time_emb_proj" or _matches(_INSIDE_MODULATION, name)):
        modulation = None
    return _matches(_EXPERTS_NAME, name), router, modulation


def reason_for(place: Place, outputs: Container[int]) -> str:
    """Why the weight of the linear layer at `place` is left alone by default; "" if it is not.

    Args:
        place: where the layer stands.
        outputs: identities of modules that models declare as their output embedding.
    """
    if place.name in _OUTPUT_NAMES or id(place.module) in outputs:
        return "output embedding"
    if place.router:
        return "router of a mixture of experts"
    if place.modulation or _matches(_MODULATION_LAYER, place.name):
        return "modulation layer"
    return ""


def in_experts(place: Place) -> bool:
    """Whether the layer is one expert's, of a list or block of experts (shared experts are dense layers)."""
    return place.experts


def holds_experts(place: Place) -> bool:
    """Whether the module's own parameters are the stacked weights of experts."""
    return _found(_EXPERTS_CLASS, type(place.module).__name__) or _matches(_EXPERTS_NAME, place.name)


@functools.cache
def _found(expression: re.Pattern[str], text: str) -> bool:
    return expression.search(text) is not None


@functools.cache
def _matches(expression: re.Pattern[str], text: str) -> bool:
    return expression.fullmatch(text) is not None
