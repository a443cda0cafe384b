"""Inductor's lowering of `linear_products`: one Triton template, for one layer or for several on one input."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from olq_fx import torch_templates
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.linear_products import Layer, Plain, linear_products
from olq_fx.kernels.product_sources import IMPORTS, LayerText, source_of, tiles_of
from olq_fx.kernels.template_operands import buffers_of, operand_like, side_of, tile_choices
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
    rows, device = x[0].get_size()[0], x[0].get_device()
    texts, inputs = _texts([Layer(*each) for each in layers], weight_format)
    a, b = operand_like(x, activation_format), operand_like(layers[0][0], weight_format)
    capability = _capability(device)
    instruction = instruction_of(a, b, k, capability)
    blocking = tile_blocking_of(torch_templates.hint(rows), texts[0].rows, k, a, b, instruction, capability)
    constants = {
        **constants_of(a, b, instruction, blocking, k),
        "K": k,
        "DTYPE": _NAMES[dtype],
        "SWAP": blocking.swap,
        "UNIFORM_B": b.outer == "k" and b.group % blocking.block_n == 0,
    }
    source = source_of(side_of("A", a), texts, constants)
    template = torch_templates.make_template("olq_fx_linear", source, _grid, IMPORTS)
    outputs = [torch_templates.new_buffer((rows, text.rows), dtype, device) for text in texts[1:]]
    made = torch_templates.launch(
        "olq_fx_linear",
        [_choice(template, tile) for tile in tile_choices(blocking)],
        [*buffers_of(x, activation_format), *inputs],
        outputs,
        torch_templates.layout((rows, texts[0].rows), dtype, device),
        (rows, tiles_of(texts, blocking.block_n) * blocking.block_n),
        subgraphs=(),
        captured=(),
    )
    if outputs:
        torch_templates.fuse_nothing_into(made)
    return [made, *outputs]


def _texts(layers: Sequence[Layer], format: str) -> tuple[list[LayerText], list[Any]]:
    """What the source says of each layer, and the buffers of all."""
    texts, inputs = [], []
    for i, layer in enumerate(layers):
        weight, parts = operand_like(layer.weight, format), buffers_of(layer.weight, format)
        bias, residual = "" if layer.bias is None else f"BIAS{i}", "" if layer.residual is None else f"RESIDUAL{i}"
        rows = weight.codes.shape[0]
        texts.append(LayerText(side_of(f"B{i}", weight), bias, residual, rows, _strides(parts, weight)))
        added = (each for each in (layer.bias, layer.residual) if each is not None)
        inputs += [*parts, *map(torch_templates.contiguous, added)]
    return texts, inputs


def _choice(template: Any, tile: Blocking) -> torch_templates.Choice:
    constants = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    return torch_templates.Choice(template, constants, tile.num_warps, tile.num_stages)


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
