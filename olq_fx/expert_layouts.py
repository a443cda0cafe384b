"""How a module of experts stores a weight of theirs in one tensor: along which axis products run, and what is merged.

    layout_of(module, leaf, tensor) -> ExpertLayout | None      None where the tree does not tell

Four things tell, in this order: what the weight was converted with; what the module says of itself (`is_transposed`,
`is_concatenated`: transformers); its sizes, where it has one weight (`input_size`, `output_size`); and the shapes of
both weights, of which only one reading fits where gate and up are merged: (E, 2 I, H) with (E, H, I), or (E, H, 2 I)
with (E, I, H).
"""

import dataclasses
import re
from typing import Any

from torch import Tensor, nn

from olq_fx import torch_distributed

_MERGED = re.compile(r"(\w+_)?gate_(and_)?up(_\w+)?|w13(_\w+)?|w1_w3|wi_merged")
_DOWN = ("down_proj", "down", "w2", "w2_weight", "wo")


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The layout of the weight of E experts.

    Attributes:
        transposed: whether it is stored as (E, K, N), not (E, N, K).
        shards: how many matrices are merged along N: 2 of gate and up, else 1.
        interleaved: whether these take turns row by row.
    """

    transposed: bool
    shards: int = 1
    interleaved: bool = False

    def logical(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """(E, N, K) of the shape of the tensor."""
        return (shape[0], shape[2], shape[1]) if self.transposed else shape


def layout_of(module: nn.Module, leaf: str, tensor: Tensor) -> ExpertLayout | None:
    """The layout of the parameter `leaf` of a module of experts; None where only its use can tell."""
    own: Any = torch_distributed.local_tensor(tensor) if torch_distributed.is_distributed(tensor) else tensor
    spec: Any = getattr(own, "spec", None) if getattr(type(own), "__olq_fx_quantized__", False) else None
    if spec is not None:
        return ExpertLayout(spec.transposed, spec.shards, spec.interleaved)
    transposed = _orientation(module, leaf, tensor)
    if transposed is None:
        return None
    shards = merged_shards(leaf)
    n = tensor.shape[2 if transposed else 1]
    if n % shards:
        shards = 1
    return ExpertLayout(transposed, shards, shards > 1 and is_interleaved(module))


def merged_shards(leaf: str) -> int:
    """How many matrices a parameter of this name consists of."""
    return 2 if _MERGED.fullmatch(leaf) else 1


def is_interleaved(module: nn.Module) -> bool:
    """Whether a module says that merged weights take turns row by row."""
    return getattr(module, "is_concatenated", True) is False


def _orientation(module: nn.Module, leaf: str, tensor: Tensor) -> bool | None:
    said = getattr(module, "is_transposed", None)
    if isinstance(said, bool):
        return said
    sizes = getattr(module, "output_size", None), getattr(module, "input_size", None)
    if leaf == "weight" and sizes[0] != sizes[1] and sizes in (tuple(tensor.shape[1:]), tuple(tensor.shape[:0:-1])):
        return sizes != tuple(tensor.shape[1:])
    parameters = module._parameters
    merged = next(
        (p for name, p in parameters.items() if p is not None and p.dim() == 3 and merged_shards(name) == 2), None
    )
    down = next((p for name in _DOWN if (p := parameters.get(name)) is not None and p.dim() == 3), None)
    if merged is None or down is None or (tensor is not merged and tensor is not down):
        return None
    (_, a, b), (_, c, d) = merged.shape, down.shape
    if (a, b) == (2 * d, c):
        return False
    return True if (a, b) == (d, 2 * c) else None
