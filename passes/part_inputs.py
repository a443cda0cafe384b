"""Graph inputs for the parts of a quantized weight, in the place of the input of the weight.

    %weight : "bf16[N, K]" = placeholder
->
    %weight : "bf16[N, K]", %weight_codes : "f8e4m3[N, K]", %weight_scale : "f32[N, 1]" = placeholders
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch.fx import Node

from olq_fx import torch_private
from olq_fx.passes.fxtools import VALUE, tensor_of

PART = "olq_fx_part"
"""The key of a graph input's meta: (name of the weight's input, which part of it comes in)."""


class Part(Protocol):
    """What one part is."""

    @property
    def name(self) -> str:
        """The attribute of the converted weight that holds it."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...


def part_inputs(weight: Node, parts: Iterable[Part]) -> list[Node]:
    """Graph inputs for the parts of a weight, after the input of the weight itself, which stays."""
    tensor = tensor_of(weight)
    assert tensor is not None
    mode = torch_private.fake_mode_of([tensor])
    found = []
    after = weight
    for index, part in enumerate(parts):
        with weight.graph.inserting_after(after):
            node = weight.graph.placeholder(f"{weight.name}_{part.name}")
        empty = torch.empty(tuple(part.shape), dtype=part.dtype, device="meta")
        node.meta[VALUE] = empty if mode is None else torch_private.fake_like(mode, empty, tensor.device)
        node.meta[PART] = (weight.name, index)
        torch_private.name_part(node, weight, part.name)
        found.append(node)
        after = node
    return found
