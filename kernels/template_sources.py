"""The text of the templates that fuse quantization with what is before it: see `template_lowering`.

A source is Triton with Inductor's hooks. What a model decides (which products there are, what is kept, which constants
hold) is written out, so that a kernel has no argument that it does not need.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

PRODUCT_IMPORTS = (
    "from olq_fx.kernels.device_maxima import raise_maxima, row_units, sum_on_load, with_units\n"
    "from olq_fx.kernels.device_producers import rounded_to\n"
    "from olq_fx.kernels.triton_encode import write_tile\n"
    "from olq_fx.kernels.triton_matmul import sum_over, tile_at, with_constants"
)

ON_LOAD_IMPORTS = (
    "from olq_fx.kernels.device_maxima import row_units, sum_on_load, with_units\n"
    "from olq_fx.kernels.device_producers import rounded_to\n"
    "from olq_fx.kernels.triton_matmul import tile_at"
)

ROW_IMPORTS = (
    "from olq_fx.kernels.device_producers import row_mean\n"
    "from olq_fx.kernels.triton_encode import row_bits, write_row_scale, write_row_tile, write_tile"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """An operand of a product in a source.

    Attributes:
        name: of its codes: `A`, `B0`.
        inner, outer: whether it has scales of these names after an underscore.
        constants: those of `triton_product.Operand`.
    """

    name: str
    inner: bool
    outer: bool
    constants: tuple[Any, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the kernel."""
        return (
            self.name,
            *((f"{self.name}_INNER",) if self.inner else ()),
            *((f"{self.name}_OUTER",) if self.outer else ()),
        )

    @property
    def pointers(self) -> str:
        """Codes, inner and outer scales, as `sum_over` takes them: codes and inner scales as bytes."""
        return ", ".join(self.each_pointer)

    @property
    def each_pointer(self) -> tuple[str, str, str]:
        """The same, one by one."""
        plain = self.constants[0] == "plain"
        codes = self.name if plain else _bytes(self.name)
        inner = _bytes(f"{self.name}_INNER") if self.inner else "None"
        return codes, inner, self.outer_pointer

    @property
    def outer_pointer(self) -> str:
        """Of the outer scales."""
        return f"{self.name}_OUTER" if self.outer else "None"

    @property
    def strides(self) -> list[str]:
        """Of codes by row, of inner and outer scales by row and column."""
        found = [_stride(self.name, 0)]
        for there, name in ((self.inner, f"{self.name}_INNER"), (self.outer, f"{self.name}_OUTER")):
            found += [_stride(name, 0), _stride(name, 1)] if there else ["0", "0"]
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class OnLoad:
    """Values in a source that a product quantizes as it loads them, by maxima that lie beside them.

    Attributes:
        constants: of the format, as `format_constants` lists them.
        parts: maxima of a row.
    """

    constants: Mapping[str, Any]
    parts: int

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the kernel."""
        return "A", "A_MAXIMA"

    def unit(self) -> list[str]:
        """`unit`: the scale of each row."""
        written = _literals([self.constants[name] for name in ("ELEMENT", "SCALE", "RULE")])
        return [f"    unit = row_units(A_MAXIMA, rows, 0, M, {self.parts}, {written})"]

    def sums(self, i: int, each: "ProductText", constants: Mapping[str, Any]) -> list[str]:
        """`y{i}`, the product with its scales in float32, of `rows` and `columns`."""
        weight, n, k = each.weight, each.rows, constants["K"]
        shared = _literals([constants[name] for name in ("DOT", "PROMOTE", "EVEN_K")])
        coarse, outer, group = self.constants["COARSE"], weight.constants[3], weight.constants[4]
        return [
            f"    acc = sum_on_load(A, A_MAXIMA, unit, {weight.pointers}, rows, columns, M, {n}, {k},",
            f"        {', '.join([_stride('A', 0), *weight.strides])}, {self.parts}, {_format(self.constants, '')},",
            f"        {_literals(weight.constants)}, {shared}, {each.uniform}, BLOCK_K)",
            f"    y{i} = with_units(acc, unit, {weight.outer_pointer}, columns, {n}, {weight.strides[3]}, {coarse},",
            f"        {outer!r}, {group})",
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Sink:
    """What a source does with the values v0 of a tile.

    Attributes:
        outputs: buffers that it writes, beside the one that the template makes.
        lines: how.
    """

    outputs: tuple[str, ...]
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ProductText:
    """One product of a source.

    Attributes:
        weight: its operand.
        bias: the name of its bias, "" for none.
        first: of its columns.
        rows: of its weight.
        uniform: whether all columns of a tile share one scale along K.
    """

    weight: Side
    bias: str
    first: int
    rows: int
    uniform: bool


def _bytes(pointer: str) -> str:
    return f"{pointer}.to(tl.pointer_type(tl.uint8), bitcast=True)"


def _stride(name: str, dim: int) -> str:
    return f'{{{{stride("{name}", {dim})}}}}'


def _literals(values: Sequence[Any]) -> str:
    return ", ".join(map(repr, values))


def product_source(
    x: Side | OnLoad,
    products: Sequence[ProductText],
    constants: Mapping[str, Any],
    inputs: Sequence[str],
    kept: int,
    width: int,
    sink: Sink,
) -> str:
    """The kernel that multiplies, applies a body, and hands its values to a sink.

    Args:
        x: the operand that all products share.
        products: which.
        constants: those of `triton_product.constants_of`, with K and DTYPE.
        inputs: what the body takes, but for tensors.
        kept: how many values are written beside those of the sink.
        width: columns of the result.
        sink: what is done with the values.
    """
    weights = [name for each in products for name in (*each.weight.arguments, *((each.bias,) if each.bias else ()))]
    outputs = [*sink.outputs, *(f"KEPT{i}" for i in range(kept))]
    lines = _head([*x.arguments, *weights, *outputs], constants, width)
    for i, each in enumerate(products):
        lines += _product(i, x, each, constants)
    lines += _places("first + tl.arange(0, BLOCK_N)")
    lines += _modifications(0, inputs, kept + 1)
    lines += _kept(range(1, kept + 1), "first + tl.arange(0, BLOCK_N)")
    return "\n".join([*lines, *sink.lines]) + "\n"


def _head(names: Sequence[str], constants: Mapping[str, Any], width: int) -> list[str]:
    given = ", ".join(f'"{name}"' for name in names)
    return [
        f"{{{{def_kernel({given})}}}}",
        '    M = {{size("A", 0)}}',
        f"    WIDTH: tl.constexpr = {width}",
        f"    tile_m, tile_n = tile_at(tl.program_id(0), M, WIDTH, BLOCK_M, BLOCK_N, {constants['GROUP']})",
        "    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)",
        "    first = tile_n * BLOCK_N",
        "    inside = first + tl.arange(0, BLOCK_N) < WIDTH",
    ]


def codes_sink(constants: Mapping[str, Any]) -> Sink:
    """Codes and scales, of groups that lie in a tile.

    Args:
        constants: those of the format.
    """
    lines = (
        f"    write_tile(v0, {_bytes('{{output()}}')}, {_scale(constants)}, None, None, rows, first,",
        f"        {_stride('SCALE', 0)}, {_stride('SCALE', 1)}, M, WIDTH, {_format(constants, '1, ')})",
    )
    return Sink(("SCALE",), lines)


def maxima_sink(wide: int, parts: int, finite: bool) -> Sink:
    """The values themselves, and the maxima of groups that are wider than a tile, of which tiles share one.

    Args:
        wide: columns of a group, which BLOCK_N divides, or those of the row.
        parts: groups of a row.
        finite: whether NaN and Inf are left out.
    """
    lines = (
        "    v0 = tl.where(inside[None, :], v0, 0.0)",
        f"    raise_maxima(v0, MAXIMA, rows, first, M, {parts}, {wide}, {finite})",
        "    at = rows.to(tl.int64)[:, None] * WIDTH + (first + tl.arange(0, BLOCK_N))[None, :]",
        "    tl.store({{output()}} + at, v0.to({{output()}}.dtype.element_ty),",
        "        mask=(rows[:, None] < M) & inside[None, :])",
    )
    return Sink(("MAXIMA",), lines)


def on_load_source(x: OnLoad, product: ProductText, constants: Mapping[str, Any], residual: bool) -> str:
    """The kernel that multiplies values which it quantizes as it loads them.

    Inductor stores the product, or what it makes of it.

    Args:
        x: the values.
        product: with all of its columns.
        constants: those of `triton_product.constants_of`, with K and DTYPE.
        residual: whether one is added.
    """
    bias = (product.bias,) if product.bias else ()
    names = [*x.arguments, *product.weight.arguments, *bias, *(("RESIDUAL",) if residual else ())]
    lines = [*_head(names, constants, product.rows), *x.unit(), "    columns = first + tl.arange(0, BLOCK_N)"]
    lines += [
        *x.sums(0, product, constants),
        "    m = rows.to(tl.int64)[:, None]",
        "    n = columns[None, :]",
        "    inside = (m < M) & (n < WIDTH)",
    ]
    if product.bias:
        lines.append(f"    y0 += tl.load({product.bias} + n, mask=n < WIDTH, other=0.0).to(tl.float32)")
    lines.append(f"    y0 = rounded_to(y0, {constants['DTYPE']!r})")
    if residual:
        lines += [
            "    more = tl.load(RESIDUAL + (n + WIDTH * m), mask=inside, other=0.0).to(tl.float32)",
            f"    y0 = rounded_to(y0 + more, {constants['DTYPE']!r})",
        ]
    lines.append('    {{store_output(("m", "n"), "y0", "inside", val_shape=("BLOCK_M", "BLOCK_N"))}}')
    return "\n".join(lines) + "\n"


def _product(i: int, x: Side | OnLoad, each: ProductText, constants: Mapping[str, Any]) -> list[str]:
    lines = [f"    columns = tl.where(inside, {each.first} + first + tl.arange(0, BLOCK_N), {each.rows})"]
    if isinstance(x, OnLoad):
        lines += [*(x.unit() if i == 0 else []), *x.sums(i, each, constants)]
    else:
        lines += _sums(i, x, each, constants)
    if each.bias:
        lines.append(
            f"    y{i} += tl.load({each.bias} + columns, mask=columns < {each.rows}, other=0.0).to(tl.float32)[None, :]"
        )
    return [*lines, f"    y{i} = rounded_to(y{i}, {constants['DTYPE']!r})"]


def _sums(i: int, x: Side, each: ProductText, constants: Mapping[str, Any]) -> list[str]:
    shared = [constants[name] for name in ("DOT", "PARTS", "PROMOTE", "EVEN_K")]
    k, n = constants["K"], each.rows
    side = f"{x.constants[3]!r}, {each.weight.constants[3]!r}, {x.constants[4]!r}, {each.weight.constants[4]!r}"
    return [
        f"    acc = sum_over({x.pointers}, {each.weight.pointers}, rows, columns, 0, {k}, M, {n}, {k},",
        f"        {', '.join([*x.strides, *each.weight.strides])},",
        f"        {_literals([*x.constants, *each.weight.constants, *shared])}, {each.uniform}, False, BLOCK_K)",
        f"    y{i} = with_constants(acc, {x.outer_pointer}, {each.weight.outer_pointer}, rows, columns, M, {n},",
        f"        {x.strides[3]}, {each.weight.strides[3]}, {side}, False)",
    ]


def _places(columns: str) -> list[str]:
    """Rows and columns of elements, within the tensors: what is beyond is computed and not written."""
    return [
        "    m = tl.minimum(rows, M - 1)[:, None]",
        f"    n = tl.minimum({columns}, WIDTH - 1)[None, :]",
    ]


def _modifications(first: int, inputs: Sequence[str], count: int, begin: int = 0) -> list[str]:
    """Values v0, v1, ... (BLOCK_M, BLOCK_N) in float32, of the body's stages `first`, `first` + 1, ..."""
    lines = [f"    {name} = m // {name.removeprefix('m_')}" for name in inputs if name.startswith("m_")]
    for i in range(count):
        lines += _modification(first + i, f"v{begin + i}", inputs)
    return lines


def _modification(number: int, name: str, inputs: Sequence[str]) -> list[str]:
    given = ", ".join(f'{each}="{each}"' for each in inputs)
    shapes = ", ".join(f'"{each}": {_shape(each)}' for each in inputs)
    hook = f'modification(subgraph_number={number}, output_name="{name}", input_shapes={{{shapes}}}, {given})'
    return [
        f"    {{{{ {hook} | indent_except_first(1) }}}}",
        f"    {name} = tl.broadcast_to({name}, (BLOCK_M, BLOCK_N)).to(tl.float32)",
    ]


def _shape(name: str) -> str:
    """The shape of an input of a stage, as Inductor tracks it."""
    if name == "n":
        return '("1", "BLOCK_N")'
    return '("BLOCK_M", "BLOCK_N")' if name.startswith("y") else '("BLOCK_M", "1")'


def _kept(numbers: Sequence[int], columns: str) -> list[str]:
    lines = []
    for i in numbers:
        pointer = f"KEPT{i - 1}"
        lines += [
            f"    at = rows.to(tl.int64)[:, None] * {_stride(pointer, 0)} + ({columns})[None, :]",
            f"    written = (rows[:, None] < M) & (({columns})[None, :] < WIDTH)",
            f"    tl.store({pointer} + at, v{i}.to({pointer}.dtype.element_ty), mask=written)",
        ]
    return lines


def _scale(constants: Mapping[str, Any]) -> str:
    return "SCALE" if constants["SCALE"] == "float32" else _bytes("SCALE")


def _format(constants: Mapping[str, Any], group_m: str) -> str:
    written = [constants[name] for name in ("ELEMENT", "SCALE", "RULE")]
    rest = [constants[name] for name in ("GROUP_K", "COARSE", "LOG", "NATIVE")]
    return f"{_literals(written)}, {group_m}{_literals(rest)}"


def row_source(
    stages: Sequence[tuple[str, str]],
    constants: Mapping[str, Any],
    inputs: Sequence[str],
    kept: int,
    width: int,
    zeros: Sequence[int] = (),
) -> str:
    """The kernel in which a program owns whole rows: reductions over them, a body, and quantization.

    Args:
        stages: of each reduction its name and the dtype that it is rounded to.
        constants: those of the format that is written, with BY_ROW, COARSE and LOG_ROW.
        inputs: what the body takes, but for tensors.
        kept: how many values are written beside the quantized ones.
        width: columns of a row, at most 2^LOG_ROW.
        zeros: columns of further tensors, which are set to 0.
    """
    coarse = ["COARSE"] if constants["HAS_COARSE"] else []
    outputs = ["SCALE", *coarse, *(f"KEPT{i}" for i in range(kept)), *(f"ZERO{i}" for i in range(len(zeros)))]
    names = ", ".join(f'"{name}"' for name in outputs)
    lines = [
        f"{{{{def_kernel({names})}}}}",
        '    M = {{size("SCALE", 0)}}',
        f"    WIDTH: tl.constexpr = {width}",
        "    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "    inside = tl.arange(0, BLOCK_N)[None, :] < WIDTH",
        *_places("tl.arange(0, BLOCK_N)"),
    ]
    known = [name for name in inputs if not name.startswith("r")]
    lines += [f"    {name} = m // {name.removeprefix('m_')}" for name in inputs if name.startswith("m_")]
    for i, (reduction, dtype) in enumerate(stages):
        given = [*known, *(name for name in inputs if name.startswith("r"))]
        lines += _modification(i, "tile", [name for name in given if _known(name, i)])
        lines += _reduced(i, reduction, dtype, constants["LOG_ROW"])
    for i in range(kept + 1):
        lines += _modification(len(stages) + i, f"v{i}", inputs)
    lines += _kept(range(1, kept + 1), "tl.arange(0, BLOCK_N)")
    lines += [
        f"    tl.store(ZERO{i} + rows.to(tl.int64) * {columns} + {part}, 0, mask=rows < M)"
        for i, columns in enumerate(zeros)
        for part in range(columns)
    ]
    lines.append("    v0 = tl.where(inside, v0, 0.0)")
    return "\n".join([*lines, *_row_sink(constants)]) + "\n"


def _known(name: str, stage: int) -> bool:
    """Whether an input of a stage is there when it is computed."""
    return not name.startswith("r") or int(name[1:].partition("_")[0]) < stage


def _reduced(i: int, reduction: str, dtype: str, log: int) -> list[str]:
    """`r{i}` (BLOCK_M, 1) of `tile`."""
    cast = "" if dtype == "fp32" else f".to(tl.{'bfloat16' if dtype == 'bf16' else 'float16'}).to(tl.float32)"
    if reduction == "amax":
        return [
            '    tile = tl.where(inside, tile, float("-inf"))',
            f"    r{i} = tl.reduce(tile, 1, triton_helpers.maximum)[:, None]{cast}",
        ]
    lines = ["    tile = tl.where(inside, tile, 0.0)"]
    if reduction == "sum":
        return [*lines, f"    r{i} = (row_mean(tile, 1.0, {log}))[:, None]{cast}"]
    if reduction == "mean":
        return [*lines, f"    r{i} = row_mean(tile, WIDTH, {log})[:, None]{cast}"]
    return [
        *lines,
        f"    r{i}_mean = row_mean(tile, WIDTH, {log})[:, None]",
        f"    tile = tl.where(inside, tile - r{i}_mean, 0.0)",
        f"    r{i} = row_mean(tile * tile, WIDTH, {log})[:, None]{cast}",
        f"    r{i}_mean = r{i}_mean{cast}",
    ]


def _row_sink(constants: Mapping[str, Any]) -> list[str]:
    coarse = "COARSE" if constants["HAS_COARSE"] else "None"
    written = [constants[name] for name in ("ELEMENT", "SCALE", "RULE")]
    strides = f"{_stride('SCALE', 0)}, {_stride('SCALE', 1)}"
    codes, scale = _bytes("{{output()}}"), _scale(constants)
    if not constants["BY_ROW"]:
        return [
            f"    write_tile(v0, {codes}, {scale}, {coarse}, None, rows, 0, {strides}, M, WIDTH,",
            f"        {_format(constants, '1, ')})",
        ]
    rest = [constants[name] for name in ("GROUP_K", "LOG", "NATIVE")]
    return [
        f"    bits = row_bits(v0, {written[1]!r})",
        f"    of_row = write_row_scale(bits, {scale}, {coarse}, rows, {_stride('SCALE', 0)}, M, {_literals(written)})",
        f"    write_row_tile(v0, of_row, {codes}, {scale}, rows, 0, {strides}, M, WIDTH, {_literals(written[:2])},",
        f"        {_literals(rest)})",
    ]
