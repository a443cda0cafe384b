"""Inductor's lowering of `fused_quantize`: one Triton template for all of it.

Where the body has products, a program computes a tile of each, applies the body to them in registers, and quantizes
groups that lie in the tile. Else a program owns rows: it takes the body's reductions over them, one after the other.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from olq_fx import numerics, torch_templates
from olq_fx.formats import Format, get_format
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.fused_quantize import Body, Plain, Product, body_of, fused_quantize
from olq_fx.kernels.on_load import maxima_of
from olq_fx.kernels.on_load_cost import on_load_tile
from olq_fx.kernels.template_operands import buffers_of, operand_like, side_of, tile_choices
from olq_fx.kernels.template_sources import (
    PRODUCT_IMPORTS,
    ROW_IMPORTS,
    OnLoad,
    ProductText,
    Side,
    Sink,
    codes_sink,
    product_source,
    row_source,
)
from olq_fx.kernels.triton_linear_chain import Chain, chain_blocking
from olq_fx.kernels.triton_product import (
    Instruction,
    Operand,
    constants_of,
    instruction_of,
    operand_of,
    tile_blocking_of,
)
from olq_fx.kernels.triton_quantize import by_row, coarse_columns

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_FLOAT8 = 89
_ROW_ELEMENTS = 2048
_WARP_ELEMENTS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What is written.

    Attributes:
        body: the stages.
        tensors: of the body, in memory.
        format: of the parts.
        rule: of their scales.
        shape: (M, K) of what is quantized.
        device: of all.
    """

    body: Body
    tensors: Sequence[Any]
    format: Format
    rule: str
    shape: tuple[Any, int]
    device: torch.device

    @property
    def capability(self) -> int:
        """Of the GPU, asked anew: one process may make code for several."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor

    @property
    def constants(self) -> dict[str, Any]:
        """Of the format, as the sources want them."""
        return format_constants(self.format, self.rule, self.capability)

    kernel: ClassVar[str] = "olq_fx_linear_quantize"

    @property
    def sink(self) -> Sink:
        """Of a kernel with products."""
        return codes_sink(self.constants)

    @property
    def like(self) -> Any:
        """The layout of codes."""
        codes, *_ = numerics.part_specs(self.format, 1, self.shape[1])
        return torch_templates.layout((self.shape[0], codes.shape[1]), codes.dtype, self.device)

    def beside(self) -> list[Any]:
        """Memory for the scales."""
        _, *scales = numerics.part_specs(self.format, 1, self.shape[1])
        return [torch_templates.new_buffer((self.shape[0], each.shape[1]), each.dtype, self.device) for each in scales]

    def launched(
        self, kernel: "Kernel", tiles: Sequence[Blocking], inputs: Sequence[Any], more: Sequence[Any] = ()
    ) -> list[Any]:
        """The results of a kernel that reads `inputs` besides the body's tensors, in the best of these tiles.

        It writes `more` buffers, the last of its results.
        """
        outputs = self.beside()
        outputs += [torch_templates.new_buffer(self.shape, dtype, self.device) for dtype in self.body.kept]
        outputs += more
        template = torch_templates.make_template(kernel.name, kernel.source, kernel.grid, kernel.imports)
        choices = [
            torch_templates.Choice(
                template,
                {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k},
                tile.num_warps,
                tile.num_stages,
            )
            for tile in tiles
        ]
        scalars = [
            torch_templates.scalar(each, torch.float32 if each[0] in "yr" else torch.int64, self.device)
            for each in self.body.inputs
            if each[0] != "t"
        ]
        bodies = [torch_templates.scalar_body(stage.graph, [*scalars, *self.tensors]) for stage in self.body.stages]
        made = torch_templates.launch(
            kernel.name, choices, inputs, outputs, self.like, self.shape, bodies, self.tensors
        )
        torch_templates.fuse_nothing_into(made)
        return [made, *outputs]


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A template: its text, what stands before it, and the grid for (M, K)."""

    name: str
    source: str
    imports: str
    grid: Callable[..., tuple[int, int, int]]


def register() -> None:
    """Tell Inductor."""
    torch_templates.register_lowering(fused_quantize, lower)
    torch_templates.register_call(torch.ops.olq_fx.quantize.default)
    torch_templates.register_rounding(torch.ops.olq_fx.rounded.default)


def format_constants(format: Format, rule: str, capability: int) -> dict[str, Any]:
    """Of a format, as the sources want them; GROUP_K is 1 where a group is a row."""
    columns = format.group[1]
    return {
        "ELEMENT": format.element,
        "SCALE": format.scale,
        "RULE": rule,
        "GROUP_K": columns or 1,
        "LOG": (columns or 1).bit_length() - 1,
        "COARSE": coarse_columns(format),
        "NATIVE": capability >= _FLOAT8,
        "BY_ROW": by_row(format),
        "HAS_COARSE": format.coarse is not None,
    }


def lower(
    body: str,
    products: Sequence[Plain],
    tensors: Sequence[Any],
    format: str,
    rule: str,
    zeros: Sequence[int] = (),
) -> list[Any]:
    """The parts, what is kept and zeros, as buffers of Inductor."""
    known, found = body_of(body), [Product(*each) for each in products]
    realized = [torch_templates.realized(tensor) for tensor in tensors]
    tall = found[0].x[0] if found else realized[known.tall]
    shape = tall.get_size()[0], known.columns
    target = Target(known, realized, get_format(format), rule, shape, tall.get_device())
    return with_products(target, found) if found else _with_rows(target, zeros)


def _inputs(target: Target) -> list[str]:
    return [name for name in target.body.inputs if name[0] != "t"]


# Products


def tile_grid(rows: int, columns: int, meta: Any, *, cdiv: Callable[[int, int], int]) -> tuple[int, int, int]:
    """One program a tile."""
    return cdiv(rows, meta["BLOCK_M"]) * cdiv(columns, meta["BLOCK_N"]), 1, 1


def with_products(target: Target, products: Sequence[Product]) -> list[Any]:
    """What a kernel makes that multiplies, and applies the target's body."""
    shared, width = products[0], target.shape[1]
    a, side, inputs = left_operand(shared, target.capability)
    weights = [operand_like(each.weight, each.weight_format) for each in products]
    instruction = instruction_of(a, weights[0], shared.k, target.capability)
    blocking = _blocking(target, a, weights, shared.k, bool(shared.rule))
    constants = {
        **constants_of(a, weights[0], instruction, blocking, shared.k),
        "K": shared.k,
        "DTYPE": NAMES[shared.dtype],
    }
    texts = []
    for i, (each, operand) in enumerate(zip(products, weights, strict=True)):
        texts.append(product_text(i, each, operand, blocking))
        inputs += buffers_of(each.weight, each.weight_format)
        inputs += [] if each.bias is None else [torch_templates.contiguous(each.bias)]
    source = product_source(side, texts, constants, _inputs(target), len(target.body.kept), width, target.sink)
    kernel = Kernel(target.kernel, source, PRODUCT_IMPORTS, tile_grid)
    return target.launched(kernel, tile_choices(blocking), inputs)


def left_operand(product: Product, capability: int) -> tuple[Operand, Side | OnLoad, list[Any]]:
    """The activations of a product: as a kernel sees them, in its text, and in memory."""
    if not product.rule:
        found = operand_like(product.x, product.activation_format)
        return found, side_of("A", found), buffers_of(product.x, product.activation_format)
    format, rows = get_format(product.activation_format), torch_templates.hint(product.x[0].get_size()[0])
    specs = numerics.part_specs(format, rows, product.k)
    found = operand_of([torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs], format.name)
    maxima = maxima_of(format)
    assert maxima is not None
    side = OnLoad(format_constants(format, product.rule, capability), maxima.parts(product.k))
    return found, side, [torch_templates.contiguous(each) for each in product.x]


def product_text(number: int, product: Product, weight: Operand, blocking: Blocking) -> ProductText:
    """A product in a source."""
    bias = "" if product.bias is None else f"BIAS{number}"
    uniform = weight.outer == "k" and weight.group % blocking.block_n == 0 and product.first % weight.group == 0
    return ProductText(side_of(f"B{number}", weight), bias, product.first, weight.codes.shape[0], uniform)


def on_load_blocking(
    m: int, n: int, k: int, operands: tuple[Operand, Operand], instruction: Instruction, capability: int
) -> Blocking:
    """An analytic choice for (m, n) of operands of which the first is quantized on load."""
    block_k = tile_blocking_of(m, n, k, *operands, instruction, capability).block_k
    return on_load_tile(m, n, instruction.dot, capability, block_k)


def _blocking(target: Target, a: Operand, weights: Sequence[Operand], k: int, on_load: bool) -> Blocking:
    rows, width = torch_templates.hint(target.shape[0]), target.shape[1]
    chain = Chain("silu", "paired") if len(weights) > 1 else Chain()
    columns = width * len(weights)
    instruction = instruction_of(a, weights[0], k, target.capability)
    if on_load:
        found = on_load_blocking(rows, columns, k, (a, weights[0]), instruction, target.capability)
        return dataclasses.replace(found, block_n=max(found.block_n, target.format.group[1] or 1))
    return chain_blocking(rows, columns, k, a, weights[0], instruction, target.format, chain, target.capability)


# Rows


def _row_grid(rows: int, columns: int, meta: Any, *, cdiv: Callable[[int, int], int]) -> tuple[int, int, int]:
    return cdiv(rows, meta["BLOCK_M"]), 1, 1


def _with_rows(target: Target, zeros: Sequence[int]) -> list[Any]:
    width = target.shape[1]
    # Groups of the widest kind lie within a tile.
    log = (max(128, width, coarse_columns(target.format)) - 1).bit_length()
    stages = [(stage.reduction, NAMES[stage.dtype]) for stage in target.body.stages if stage.reduction]
    constants = {**target.constants, "LOG_ROW": log}
    source = row_source(stages, constants, _inputs(target), len(target.body.kept), width, zeros)
    block_m = max(1, _ROW_ELEMENTS >> log)
    warps = min(32, max(1, (block_m << log) // _WARP_ELEMENTS))
    kernel = Kernel("olq_fx_rows_quantize", source, ROW_IMPORTS, _row_grid)
    tiles = [Blocking(block_m, 1 << log, 1, num_warps=warps, num_stages=1)]
    rows = target.shape[0]
    return target.launched(
        kernel,
        tiles,
        [],
        [torch_templates.new_buffer((rows, columns), torch.int32, target.device) for columns in zeros],
    )
