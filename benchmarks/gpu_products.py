"""The products that are timed on a GPU: of many rows, of few rows, of experts.

Kernels and peers are imported where they are used: not every one is everywhere.
"""

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gpu_data as data
import torch
from gpu_timing import Comparison, Target
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import FORMATS, get_format
from olq_fx.gpu_timing import Entry, Run
from olq_fx.kernels import reference

LARGE = (4096, 7168, 16384)
"""M, N, K of the products of many rows."""

WIDE = (8192, 8192)
"""N and K of the products of few rows."""

OF_EXPERTS = (4096, 7168)
"""N and K of the products of experts."""

FEW = (1, 16, 64)
ORIGINAL = "torch bf16 matmul"
TILES = "olq_fx, a program for each tile"
_ROW, _BLOCK, _BASELINE, _FEW_8_BIT, _FEW_4_BIT = 0.95, 1000.0, 1.3, 0.75, 0.65
"""Targets: ratios to `_scaled_mm` by row, TFLOP/s by block and ratio to the baseline, shares of the bandwidth."""

_CHECKED = 64
"""Rows of a product that are compared with the reference."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A product to time: (M, K) in one format by (N, K) in another; no activation format is bfloat16.

    Its work is that of the quantized layer, for peers too: operations, or bytes where `by_bytes`.
    """

    weight: str
    activation: str
    m: int
    n: int
    k: int
    by_bytes: bool = False

    @property
    def title(self) -> str:
        return f"{self.weight} x {self.activation or 'bf16'}, M = {self.m}, N = {self.n}, K = {self.k}"

    @property
    def bytes(self) -> int:
        """That it moves at least."""
        read = numerics.quantized_bytes(get_format(self.activation), self.m, self.k) if self.activation else 0
        weight = numerics.quantized_bytes(get_format(self.weight), self.n, self.k)
        return weight + (read or 2 * self.m * self.k) + 2 * self.m * self.n

    @property
    def work(self) -> int:
        return self.bytes if self.by_bytes else 2 * self.m * self.n * self.k

    def operands(self, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Parts of activations and weight."""
        x, weight = data.random(self.m, self.k, seed=seed), data.random(self.n, self.k, seed=seed + 1000)
        return data.quantized(x, self.activation) if self.activation else [x], data.quantized(weight, self.weight)

    def entry(self, name: str, make: Callable[[list[Tensor], list[Tensor]], Run]) -> Entry:
        """An entry that multiplies these operands; `make` takes their parts."""
        return Entry(name, lambda number: make(*self.operands(number)), self.work, self.bytes)

    def output(self) -> Tensor:
        return torch.empty(self.m, self.n, dtype=torch.bfloat16, device=data.DEVICE)

    def calls(self, x: list[Tensor], weight: list[Tensor], out: Tensor, tiles: bool = False) -> list[Any]:
        """Our kernels; those of `tiles` instead of the form for one row or for many."""
        module, capability = importlib.import_module("olq_fx.kernels.triton_product"), data.capability()
        args, blocking = (x, self.activation, weight, self.weight, self.k, out), None
        if tiles:
            a, b = module.operand_of(x, self.activation), module.operand_of(weight, self.weight)
            instruction = module.instruction_of(a, b, self.k, capability)
            blocking = module.tile_blocking_of(self.m, self.n, self.k, a, b, instruction, capability)
        found: list[Any] = module.product_calls(*args, bias=None, capability=capability, blocking=blocking)
        return found

    def ours(self) -> Entry:
        return self.entry("olq_fx", lambda x, weight: data.launching(self.calls(x, weight, self.output())))

    def tiles(self) -> Entry:
        """What the form for one row or for many is to be better than."""
        return self.entry(TILES, lambda x, weight: data.launching(self.calls(x, weight, self.output(), tiles=True)))

    def original(self) -> Entry:
        def make(number: int) -> Run:
            x, weight, out = data.random(self.m, self.k, seed=number), data.random(self.n, self.k), self.output()
            return lambda: torch.mm(x, weight.T, out=out)

        return Entry(ORIGINAL, make, self.work, 2 * (self.m * self.k + self.n * self.k + self.m * self.n))

    def check(self) -> None:
        """Hold the first rows to the product of the dequantized operands in float32."""
        x, weight = self.operands(0)
        out = self.output()
        data.launching(self.calls(x, weight, out))()
        rows = min(self.m, _CHECKED)
        plain = reference.dequantize(x, self.activation, self.k, torch.float32) if self.activation else x[0].float()
        expected = plain[:rows] @ reference.dequantize(weight, self.weight, self.k, torch.float32).T
        error = float((out[:rows].float() - expected).norm() / expected.norm())
        assert error < 0.01, f"{error:.3f} away from the product of the dequantized operands"


def products_part() -> Iterator[Callable[[], Comparison]]:
    """Many rows against cuBLASLt, the baseline and bfloat16; few rows against the bandwidth of a copy."""
    yield from (row_comparison, tensor_comparison, block_comparison, int8_comparison)
    for weight, activation in (
        ("mxfp8", "mxfp8"),
        ("mxfp4", "mxfp4"),
        ("nvfp4", "nvfp4_per_token"),
        ("mxfp4", "mxfp8"),
        ("mxfp8", "mxfp4"),
    ):
        yield functools.partial(_against_original, Product(weight, activation, *LARGE))
    for name, format in FORMATS.items():
        if format.weight:
            for m in FEW:
                for activation in (format.default_activation or "", ""):
                    yield functools.partial(few_rows_comparison, Product(name, activation, m, *WIDE, by_bytes=True))


def _against_original(product: Product, peers: Sequence[Entry] = (), targets: Sequence[Target] = ()) -> Comparison:
    entries = (product.ours(), *peers, product.original())
    return Comparison(product.title, entries, "TFLOP/s", tuple(targets), product.check)


def row_comparison() -> Comparison:
    product, peer = Product("fp8_per_channel_static", "fp8_per_token", *LARGE), "torch._scaled_mm by row"

    def make(x: list[Tensor], weight: list[Tensor]) -> Run:
        scales = x[1], weight[1].T
        return lambda: _scaled_mm(x[0], weight[0].T, *scales)

    def templates(x: list[Tensor], weight: list[Tensor]) -> Run:
        compiled = torch.compile(_scaled_mm, mode="max-autotune-no-cudagraphs", dynamic=False)
        right, scales = weight[0].T, (x[1], weight[1].T)
        return lambda: compiled(x[0], right, *scales)

    peers = (product.entry(peer, make), product.entry("Inductor, max-autotune", templates), product.tiles())
    return _against_original(product, peers, [Target(_ROW, peer)])


def tensor_comparison() -> Comparison:
    product, peer = Product("fp8_per_tensor_static", "fp8_per_tensor_dynamic", *LARGE), "torch._scaled_mm by tensor"

    def make(x: list[Tensor], weight: list[Tensor]) -> Run:
        scales = x[1].reshape(()), weight[1].reshape(())
        return lambda: _scaled_mm(x[0], weight[0].T, *scales)

    return _against_original(product, [product.entry(peer, make)])


def block_comparison() -> Comparison:
    product = Product("fp8_per_block_static", "fp8_per_block_dynamic", *LARGE)
    peer, baseline = "torch._scaled_mm by block", "plain Triton block kernel"

    def make(x: list[Tensor], weight: list[Tensor]) -> Run:
        # cuBLASLt wants the scales of activations by columns (M next to each other).
        scales = x[1].T.contiguous().T, weight[1].T
        return lambda: _scaled_mm(x[0], weight[0].T, *scales)

    def plain(x: list[Tensor], weight: list[Tensor]) -> Run:
        from gpu_baseline import multiply

        out = product.output()
        return lambda: multiply(x[0], weight[0], x[1], weight[1], out)

    peers = (product.entry(peer, make), product.entry(baseline, plain), product.tiles())
    return _against_original(product, peers, [Target(_BLOCK), Target(_BASELINE, baseline)])


def int8_comparison() -> Comparison:
    product = Product("int8_per_channel_static", "int8_per_token", *LARGE)

    def make(x: list[Tensor], weight: list[Tensor]) -> Run:
        return lambda: torch._int_mm(x[0], weight[0].T)  # without the scales

    return _against_original(product, [product.entry("torch._int_mm", make), product.tiles()])


def _scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=torch.bfloat16)


def few_rows_comparison(product: Product) -> Comparison:
    """Rates are bytes of the quantized layer, so that the share of the bandwidth of a copy is a ratio of rates."""
    format = get_format(product.weight)
    peers = [data.copy_entry(product.bytes), product.original()]
    if product.m == 1:
        peers.append(product.tiles())
    if not product.activation and product.weight in _LIBRARIES:
        peers += [_library_entry(product, name) for name in _LIBRARIES[product.weight]]
    share = _FEW_4_BIT if format.packed else _FEW_8_BIT
    return Comparison(product.title, (product.ours(), *peers), "GB/s", (Target(share, data.COPY),), product.check)


def _torchao(config: str, layer: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    from torchao import quantization

    quantization.quantize_(layer, getattr(quantization, config)())
    compiled: Callable[[Tensor], Tensor] = torch.compile(layer, dynamic=False)
    return compiled


def _gemlite(layer: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    helper = importlib.import_module("gemlite.helper")
    found: Callable[[Tensor], Tensor] = helper.A16W8(device="cuda:0").from_linear(layer)
    return found


_LIBRARIES: dict[str, dict[str, Callable[[torch.nn.Linear], Callable[[Tensor], Tensor]]]] = {
    "int8_per_channel_static": {
        "torchao int8 weight-only, compiled": functools.partial(_torchao, "Int8WeightOnlyConfig"),
        "gemlite A16W8": _gemlite,
    },
    "fp8_per_channel_static": {
        "torchao fp8 weight-only, compiled": functools.partial(_torchao, "Float8WeightOnlyConfig"),
    },
}
"""Layers of other libraries, for weights of a format beside activations in original precision."""


def _library_entry(product: Product, name: str) -> Entry:
    def make(number: int) -> Run:
        layer = torch.nn.Linear(product.k, product.n, bias=False, device=data.DEVICE, dtype=torch.bfloat16)
        layer.requires_grad_(False)
        layer.weight.copy_(data.random(product.n, product.k, seed=number))
        x, run = data.random(product.m, product.k, seed=number), _LIBRARIES[product.weight][name](layer)

        def call() -> Tensor:
            with torch.no_grad():
                return run(x)

        return call

    return Entry(name, make, product.work, product.bytes)


# Experts

_EXPERTS = (256, 1900, 0, 1024, 3100, 64, 832, 1016)
"""Rows of each expert: 8192 in all."""


def grouped_part() -> Iterator[Callable[[], Comparison]]:
    """Products over ragged segments of experts, against one bfloat16 product after the other."""
    for weight, activation in (
        ("fp8_per_channel_static", "fp8_per_token"),
        ("fp8_per_block_static", "fp8_per_block_dynamic"),
        ("int8_per_channel_static", "int8_per_token"),
        ("mxfp8", "mxfp8"),
        ("mxfp4", "mxfp4"),
        ("nvfp4", "nvfp4_per_token"),
    ):
        yield functools.partial(grouped_comparison, Product(weight, activation, sum(_EXPERTS), *OF_EXPERTS))


@dataclasses.dataclass(frozen=True)
class Grouped:
    """The rows of each expert by its weight."""

    product: Product

    def made(self, number: int) -> tuple[list[Tensor], list[list[Tensor]], Tensor, Run]:
        """Parts of the activations, parts of each weight, the output, and what fills it."""
        experts = importlib.import_module("olq_fx.kernels.experts")
        kernels = importlib.import_module("olq_fx.kernels.triton_experts")
        product, out = self.product, self.product.output()
        x = data.quantized(data.random(product.m, product.k, seed=number), product.activation)
        weights = [data.quantized(weight, product.weight) for weight in self.originals(number)]
        stack = experts.Stack([torch.stack(parts) for parts in zip(*weights, strict=True)], product.weight)
        offsets = torch.tensor([0, *itertools.accumulate(_EXPERTS)], dtype=torch.int32, device=data.DEVICE)
        names = (x, product.activation, stack, product.k, out, experts.Segments(offsets))
        return x, weights, out, data.launching(kernels.grouped_calls(*names, tail=False, capability=data.capability()))

    def originals(self, number: int) -> Iterator[Tensor]:
        """The weights in bfloat16."""
        for expert in range(len(_EXPERTS)):
            yield data.random(self.product.n, self.product.k, seed=1000 * (number + 1) + expert)

    def original(self, number: int) -> Run:
        """One product after the other."""
        x, out = data.random(self.product.m, self.product.k, seed=number), self.product.output()
        rows = list(zip(x.split(_EXPERTS), out.split(_EXPERTS), self.originals(number), strict=True))

        def run() -> None:
            for some, target, weight in rows:
                torch.mm(some, weight.T, out=target)

        return run

    def check(self) -> None:
        """Hold the first rows of each expert to the product of the dequantized operands in float32."""
        x, weights, out, run = self.made(0)
        run()
        plain = reference.dequantize(x, self.product.activation, self.product.k, torch.float32)
        segments = zip(plain.split(_EXPERTS), out.split(_EXPERTS), weights, strict=True)
        for expert, (some, found, weight) in enumerate(segments):
            decoded = reference.dequantize(weight, self.product.weight, self.product.k, torch.float32)
            expected = some[:_CHECKED] @ decoded.T
            error = float((found[:_CHECKED].float() - expected).norm() / expected.norm().clamp(min=1e-9))
            assert error < 0.01, f"expert {expert} is {error:.3f} away from the product of the dequantized operands"


def grouped_comparison(product: Product) -> Comparison:
    grouped = Grouped(product)
    used = sum(rows > 0 for rows in _EXPERTS)
    touched = used * numerics.quantized_bytes(get_format(product.weight), product.n, product.k)
    ours = Entry("olq_fx", lambda number: grouped.made(number)[-1], product.work, touched)
    peer = Entry(f"{ORIGINAL} of each expert", grouped.original, product.work, 2 * used * product.n * product.k)
    return Comparison(f"{len(_EXPERTS)} experts: {product.title}", (ours, peer), "TFLOP/s", (), grouped.check)
