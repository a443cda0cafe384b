"""Inductor's lowering of `linear_products`: one Triton template, for one layer or for several on one input."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from olq_fx import torch_templates
from olq_fx.kernels.linear_products import Layer, Plain, linear_products
from olq_fx.kernels.product_sources import IMPORTS, LayerText, source_of, tiles_of
from olq_fx.kernels.template_operands import buffers, operand, side, tiles
from olq_fx.kernels.triton_product import constants_of, instruction_of, tile_blocking_of

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def register() -> None:
    """Tell Inductor."""
    torch_templates.register_lowering(linear_products, lower)


def lower(
    x: Sequence[Any], activation_format: str, layers: Sequence[Plain], weight_format: str, k: int, dtype: torch.dtype
) -> list[Any]:
    """The results (M, N), as buffers of Inductor.

    A tile, and the order of its sums, is that of the operator for a layer alone: whether the operator would take it is
    what `product_forms` says.
    """
    found = [Layer(*each) for each in layers]
    rows, device = x[0].get_size()[0], x[0].get_device()
    a, weights = operand(x, activation_format), [operand(each.weight, weight_format) for each in found]
    capability = _capability(device)
    instruction = instruction_of(a, weights[0], k, capability)
    m, n = torch_templates.hint(rows), weights[0].codes.shape[0]
    blocking = tile_blocking_of(m, n, k, a, weights[0], instruction, capability)
    constants = {
        **constants_of(a, weights[0], instruction, blocking, k),
        "K": k,
        "DTYPE": _NAMES[dtype],
        "SWAP": blocking.swap,
        "UNIFORM_B": weights[0].outer == "k" and weights[0].group % blocking.block_n == 0,
    }
    inputs, texts = buffers(x, activation_format), []
    for i, (each, weight) in enumerate(zip(found, weights, strict=True)):
        parts, added = buffers(each.weight, weight_format), [each.bias, each.residual]
        inputs += [*parts, *(torch_templates.contiguous(one) for one in added if one is not None)]
        names = ["" if one is None else f"{name}{i}" for one, name in zip(added, ("BIAS", "RESIDUAL"), strict=True)]
        texts.append(LayerText(side(f"B{i}", weight), *names, weight.codes.shape[0], _strides(parts, weight)))
    source = source_of(side("A", a), texts, constants)
    template = torch_templates.make_template("olq_fx_linear", source, _grid, IMPORTS)
    choices = [
        torch_templates.Choice(
            template,
            {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k},
            tile.num_warps,
            tile.num_stages,
        )
        for tile in tiles(blocking)
    ]
    outputs = [torch_templates.new_buffer((rows, text.rows), dtype, device) for text in texts[1:]]
    like = torch_templates.layout((rows, texts[0].rows), dtype, device)
    sizes = rows, tiles_of(texts, blocking.block_n) * blocking.block_n
    made = torch_templates.launch("olq_fx_linear", choices, inputs, outputs, like, sizes, (), ())
    if outputs:
        torch_templates.fuse_nothing_into(made)
    return [made, *outputs]


def _capability(device: torch.device) -> int:
    """Of the GPU, asked anew: one process may make code for several."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _grid(rows: int, columns: int, meta: Any, *, cdiv: Callable[[int, int], int]) -> tuple[int, int, int]:
    return cdiv(rows, meta["BLOCK_M"]) * cdiv(columns, meta["BLOCK_N"]), 1, 1


def _strides(parts: Sequence[Any], weight: Any) -> tuple[int, ...]:
    """Of codes by row, of inner and outer scales by row and column; 0 for a scale that is not there."""
    codes, *scales = ([int(stride) for stride in part.get_stride()] for part in parts)
    found = [codes[0]]
    for scale in (weight.inner_scale, weight.outer_scale):
        found += scales.pop(0)[:2] if scale is not None else [0, 0]
    return tuple(found)
