"""Latency of one compiled linear layer in every scheme, against float32 and bfloat16 `F.linear` and against torchao.

All entries of one M are compiled first and then measured in turn. The aim: at M = 1 no slower than torchao's int8
weight-only for weights of 8 bits and than bfloat16 for all others; else within 1.25 times the faster of the two
unquantized ones.
"""

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from common import interleaved, medians, parser, quiet_torchao, report
from torch import Tensor, nn

import olq_fx
from olq_fx.formats import FORMATS
from olq_fx.schemes import SCHEMES

COLUMNS = ("entry", "M", "ms", "over float32", "over bfloat16", "over torchao", "torchao entry", "aim")
INT8_WEIGHT_ONLY = "torchao Int8WeightOnly"
SLACK = 1.25


_WHY = (
    "Why: our products decode a weight to float32 and add in float32, which at M = 1 takes two or three instructions "
    "more a byte of float8 than of int8. Where the processor has instructions for bfloat16 or int8 (AVX512_BF16, "
    "AVX512_VNNI), unquantized bfloat16 is two to five times as fast as float32 from M = 32 on, and no decoded product "
    "is."
)
"""What a run that misses an aim says of the reason."""


def peer_configs() -> dict[str, Any]:
    """torchao's configurations that may run on a CPU."""
    quiet_torchao()
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        PerRow,
    )

    return {
        INT8_WEIGHT_ONLY: Int8WeightOnlyConfig(),
        "torchao Int8Dynamic": Int8DynamicActivationInt8WeightConfig(),
        "torchao Float8WeightOnly": Float8WeightOnlyConfig(),
        "torchao Float8Dynamic": Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
    }


def peer_of(scheme: str) -> str:
    """torchao's equivalent of a scheme that runs on a CPU; int8 weight-only where it has none."""
    slot = SCHEMES[scheme].linear
    if FORMATS[slot.weight].element == "int8":
        return "torchao Int8Dynamic" if slot.activation else INT8_WEIGHT_ONLY
    if slot.weight == "fp8_per_channel_static":
        return "torchao Float8Dynamic" if slot.activation else "torchao Float8WeightOnly"
    return INT8_WEIGHT_ONLY


def layer(k: int, n: int) -> nn.Module:
    """The layer that is quantized: bfloat16, without gradients."""
    generator = torch.Generator().manual_seed(0)
    made = nn.Linear(k, n, bias=True, dtype=torch.bfloat16)
    with torch.no_grad():
        made.weight.copy_(torch.randn(n, k, generator=generator) / k**0.5)
    return made.requires_grad_(False).eval()


def compiled(scheme: str, k: int, n: int) -> Callable[[Tensor], Tensor]:
    """One entry by its name, compiled for static shapes."""
    module = layer(k, n)
    if scheme == "float32":
        module = module.float()
    elif scheme in SCHEMES:
        olq_fx.quantize_(module, scheme)
    elif scheme.startswith("torchao"):
        from torchao.quantization import quantize_

        quantize_(module, peer_configs()[scheme])

    def call(x: Tensor) -> Tensor:
        return module(x)

    # A code object of its own: Dynamo keeps all that it compiled from one code together, and stops at eight.
    code = call.__code__.replace(co_name=f"call_{scheme}".replace(" ", "_"))
    own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    return torch.compile(own, dynamic=False)  # type: ignore[no-any-return]


def entries(names: list[str], m: int, k: int, n: int) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """The calls to measure, warm, and why others are missing."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = layer(k, n).float()(x.float())
    calls: dict[str, Callable[[], object]] = {}
    missing: dict[str, str] = {}
    for name in names:
        given = x.float() if name == "float32" else x
        try:
            run = compiled(name, k, n)
            noise = float((run(given).float() - expected).norm() / expected.norm())
        except Exception as error:  # a peer that does not run here is a finding, not an end
            if name in SCHEMES:
                raise
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            continue
        if not noise < 0.35:
            raise AssertionError(f"{name} at M = {m} is {noise:.2f} away from float32: not worth measuring")
        calls[name] = lambda run=run, given=given: run(given)
    return calls, missing


def aim_of(scheme: str, m: int, found: dict[str, float]) -> tuple[str, bool]:
    """What the scheme should not exceed, in words, and whether it does not."""
    if m > 1:
        limit = SLACK * min(found["float32"], found["bfloat16"])
        return f"{SLACK} x unquantized", found[scheme] <= limit
    wide = FORMATS[SCHEMES[scheme].linear.weight].element != "e2m1"
    against = INT8_WEIGHT_ONLY if wide and INT8_WEIGHT_ONLY in found else "bfloat16"
    return against, found[scheme] <= found[against]


def row_of(name: str, m: int, found: dict[str, float]) -> tuple[tuple[str, ...], bool]:
    """The cells of one entry, and whether it misses its aim."""
    over = [f"{found[name] / found[other]:.2f}" for other in ("float32", "bfloat16")]
    cells = (name, str(m), f"{1e3 * found[name]:.2f}", *over)
    if name not in SCHEMES:
        return (*cells, "", "", ""), False
    peer = peer_of(name)
    against = f"{found[name] / found[peer]:.2f}" if peer in found else ""
    aim, reached = aim_of(name, m, found)
    return (*cells, against, peer.removeprefix("torchao "), f"{'reached' if reached else 'MISSED'}: {aim}"), not reached


def main() -> int:
    """Measure, print, save."""
    options = parser(__doc__)
    options.add_argument("--shape", type=int, nargs=2, default=(4096, 4096), metavar=("N", "K"))
    options.add_argument("--m", type=int, nargs="+", default=(1, 32, 512), help="rows of the input (default 1 32 512)")
    options.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES), metavar="SCHEME")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    n, k = arguments.shape
    names = ["float32", "bfloat16", *peer_configs(), *arguments.schemes]
    rows, measured, missed, gone = [], [], [], {}
    for m in arguments.m:
        torch.compiler.reset()
        with torch.no_grad():
            calls, missing = entries(names, m, k, n)
            times = interleaved(calls, arguments.rounds if m > 32 else 5 * arguments.rounds)
        gone |= missing
        found = medians(times)
        for name in calls:
            cells, misses = row_of(name, m, found)
            rows.append(cells)
            measured.append({"entry": name, "m": m, "n": n, "k": k, "seconds": times[name], "aim_missed": misses})
            if misses:
                missed.append(f"{name} at M = {m}")
    notes = [f"{name} does not run here ({reason})." for name, reason in gone.items()]
    notes.append(f"Missed: {', '.join(missed)}. {_WHY}" if missed else "Every scheme reaches its aim.")
    title = f"One compiled bfloat16 linear layer, N = {n}, K = {k}, medians"
    report("linear_latency", arguments, title, COLUMNS, rows, measured, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
