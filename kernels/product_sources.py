"""The text of the templates that multiply quantized layers on one input: see `product_lowering`.

A source is Triton with Inductor's hooks. One layer ends in Inductor's own store, which takes what is computed element
by element of the result into the kernel. Of several, a program looks up by the column of its tile which one it works
on, and goes on with the pointers of that one.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from olq_fx.kernels.template_sources import Side

IMPORTS = (
    "from olq_fx.kernels.device_producers import rounded_to\n"
    "from olq_fx.kernels.triton_matmul import finish, sum_over, tile_at, with_constants"
)

_NAMES = ("codes", "inner", "outer")
_A_STRIDES = ("a_stride", "a_inner_m", "a_inner_k", "a_outer_m", "a_outer_k")
_STRIDES = ("b_stride", "b_inner_n", "b_inner_k", "b_outer_n", "b_outer_k")


@dataclasses.dataclass(frozen=True, slots=True)
class LayerText:
    """One layer of a source.

    Attributes:
        weight: its operand.
        bias, residual: the names of these, "" for none.
        rows: of its weight.
        strides: of its codes by row, of its scales by row and column; those of layers that differ are looked up.
    """

    weight: Side
    bias: str
    residual: str
    rows: int
    strides: tuple[int, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the kernel."""
        return *self.weight.arguments, *filter(None, (self.bias, self.residual))


def source_of(x: Side, layers: Sequence[LayerText], constants: Mapping[str, Any]) -> str:
    """The kernel for some layers.

    Args:
        x: the operand that they share.
        layers: which; all have a bias or none has, and so with residuals.
        constants: those of `triton_product.constants_of`, with K, DTYPE, SWAP and UNIFORM_B.
    """
    outputs = [f"OUT{i}" for i in range(1, len(layers))]
    names = [*x.arguments, *(name for each in layers for name in each.arguments), *outputs]
    lines = [
        f"{{{{def_kernel({', '.join(map(repr, names))})}}}}",
        # What the operator is given when it runs is no constant here either: what the compiler unrolls and folds for
        # the sake of a number takes more registers than there are, now and then.
        "    one = tl.num_programs(1)",
        '    M = one * {{size("A", 0)}}',
        f"    K = one * {constants['K']}",
        *(f"    {name} = {_hidden(stride, name)}" for name, stride in zip(_A_STRIDES, x.strides, strict=True)),
        *_places(layers, constants),
        *_product(x, layers[0], constants),
        *(_one(layers[0], x, constants) if len(layers) == 1 else _several(layers[0], x, constants)),
    ]
    return "\n".join(lines) + "\n"


def tiles_of(layers: Sequence[LayerText], block_n: int) -> int:
    """Tiles side by side: none has columns of two layers."""
    return sum(-(-each.rows // block_n) for each in layers)


def _places(layers: Sequence[LayerText], constants: Mapping[str, Any]) -> list[str]:
    """Rows and columns of a tile, and what is its layer's own by the names that `_product` and the rest know."""
    block_n = constants["BLOCK_N"]
    first = [tiles_of(layers[:i], block_n) for i in range(len(layers))]
    wide = tiles_of(layers, block_n) * block_n

    def own(name: str, value: Callable[[int, LayerText], str]) -> str:
        return f"    {name} = {_chosen([value(i, each) for i, each in enumerate(layers)], first)}"

    pointers = [each.weight.each_pointer for each in layers]
    return [
        f"    tile_m, tile_n = tile_at(tl.program_id(0), M, {wide}, BLOCK_M, BLOCK_N, {constants['GROUP']})",
        "    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)",
        *(own(name, lambda i, each, j=j: pointers[i][j]) for j, name in enumerate(_NAMES)),  # type: ignore[misc]
        *(own(name, lambda i, each, j=j: _stride(j, each)) for j, name in enumerate(_STRIDES)),  # type: ignore[misc]
        own("N", lambda i, each: _number(each.rows)),
        own("bias", lambda i, each: each.bias or "None"),
        own("residual", lambda i, each: each.residual or "None"),
        *([own("out", lambda i, each: f"OUT{i}" if i else "{{output()}}")] if len(layers) > 1 else []),
        own("tile_n", lambda i, each: f"tile_n - {first[i]}" if i else "tile_n"),
        "    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)",
    ]


def _chosen(values: Sequence[str], first: Sequence[int]) -> str:
    """The value of the layer that a tile belongs to."""
    if len(set(values)) == 1:
        return values[0]
    found = values[0]
    for value, begin in zip(values[1:], first[1:], strict=True):
        found = f"tl.where(tile_n >= {begin}, {value}, {found})"
    return found


def _number(value: int) -> str:
    """A stride or an extent; 0 and 1 are what the operator is compiled for too."""
    return str(value) if value in (0, 1) else f"one * {value}"


def _stride(j: int, layer: LayerText) -> str:
    """Number `j` of the strides. Outer scales are read one by one, so that a 1 is of no use."""
    value = layer.strides[j]
    return f"one * {value}" if value and _STRIDES[j].startswith("b_outer") else _number(value)


def _hidden(stride: str, name: str) -> str:
    """A stride of the activations; one after the other, inner scales are read several at once."""
    return stride if stride == "0" or name == "a_inner_k" else f"one * {stride}"


def _product(x: Side, layer: LayerText, constants: Mapping[str, Any]) -> list[str]:
    shared = [constants[name] for name in ("DOT", "PARTS", "PROMOTE", "EVEN_K", "UNIFORM_B", "SWAP")]
    return [
        f"    acc = sum_over({x.pointers}, {', '.join(_NAMES)}, rows, columns, 0, K, M, N, K,",
        f"        {', '.join([*_A_STRIDES, *_STRIDES])},",
        f"        {_literals([*x.constants, *layer.weight.constants, *shared])}, BLOCK_K)",
    ]


def _scales(layer: LayerText, x: Side, constants: Mapping[str, Any]) -> str:
    """The end of a call of `with_constants` and `finish`."""
    a, b = x.constants, layer.weight.constants
    return f"a_outer_m, b_outer_n, {_literals([a[3], b[3], a[4], b[4], constants['SWAP']])})"


def _several(layer: LayerText, x: Side, constants: Mapping[str, Any]) -> list[str]:
    return [
        f"    finish(acc, {x.outer_pointer}, outer, bias, residual, out, rows, columns, M, N,",
        f"        {_scales(layer, x, constants)}",
    ]


def _one(layer: LayerText, x: Side, constants: Mapping[str, Any]) -> list[str]:
    """As `triton_matmul.finish`, but that Inductor stores what it makes of the result."""
    swap, dtype = constants["SWAP"], constants["DTYPE"]
    m, n = ("[None, :]", "[:, None]") if swap else ("[:, None]", "[None, :]")
    shape = '("BLOCK_N", "BLOCK_M")' if swap else '("BLOCK_M", "BLOCK_N")'
    lines = [
        f"    y = with_constants(acc, {x.outer_pointer}, outer, rows, columns, M, N,",
        f"        {_scales(layer, x, constants)}",
        f"    m = rows.to(tl.int64){m}",
        f"    n = columns{n}",
        "    inside = (m < M) & (n < N)",
    ]
    if layer.bias:
        lines.append("    y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)")
    lines.append(f"    y = rounded_to(y, {dtype!r})")
    if layer.residual:
        lines.append("    more = tl.load(residual + (n + N * m), mask=inside, other=0.0).to(tl.float32)")
        lines.append(f"    y = rounded_to(y + more, {dtype!r})")
    return [*lines, f'    {{{{store_output(("m", "n"), "y", "inside", val_shape={shape})}}}}']


def _literals(values: Sequence[Any]) -> str:
    return ", ".join(map(repr, values))
