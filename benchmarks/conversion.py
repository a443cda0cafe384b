"""How fast a weight is converted: GB/s of bfloat16 source, against torchao's eager conversion and against a copy.

Where torchao has the same rule it is the peer, and how many codes are the same is shown (not all: it divides in
bfloat16 for some formats). A rule without a counterpart in torchao is measured against the nearest one and has a star.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import cold_caches, interleaved, medians, parser, quiet_torchao, report
from torch import Tensor

from olq_fx.formats import FORMATS
from olq_fx.kernels import ops  # noqa: F401 (registers the operators)

COLUMNS = ("format", "rule", "GB/s", "torchao GB/s", "times", "of a copy", "peer", "same codes")


@dataclasses.dataclass(frozen=True)
class Peer:
    """torchao's conversion of a weight: what it is called, whether its rule is ours, and how to run it."""

    name: str
    equal: bool
    convert: Callable[[Tensor], Any]


def peers() -> dict[tuple[str, str], Peer]:
    """torchao's nearest conversion for each format and rule."""
    quiet_torchao()
    from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor, Int8Tensor, PerBlock, PerRow, PerTensor

    def float8(granularity: Any) -> Callable[[Tensor], Any]:
        return lambda w: Float8Tensor.from_hp(w, torch.float8_e4m3fn, granularity)

    def mx(element: Any, mode: Mode) -> Callable[[Tensor], Any]:
        return lambda w: MXTensor.to_mx(w, element, 32, mode)

    def nvfp4(w: Tensor) -> Any:
        return NVFP4Tensor.to_nvfp4(w, per_tensor_scale=per_tensor_amax_to_scale(w.abs().max()))

    e2m1 = torch.float4_e2m1fn_x2
    even = Peer("MXTensor EVEN", False, mx(e2m1, Mode.EVEN))
    found = {
        ("fp8_per_tensor_static", "amax"): Peer("Float8Tensor PerTensor", True, float8(PerTensor())),
        ("fp8_per_channel_static", "amax"): Peer("Float8Tensor PerRow", True, float8(PerRow())),
        ("fp8_per_block_static", "amax"): Peer("Float8Tensor PerBlock", True, float8(PerBlock([128, 128]))),
        ("int8_per_channel_static", "amax"): Peer("Int8Tensor PerRow", True, lambda w: Int8Tensor.from_hp(w, PerRow())),
        ("mxfp8", "ceil"): Peer("MXTensor RCEIL", True, mx(torch.float8_e4m3fn, Mode.RCEIL)),
        ("nvfp4", "amax"): Peer("NVFP4Tensor", True, nvfp4),
        ("nvfp4", "four_over_six"): Peer("NVFP4Tensor", False, nvfp4),
    }
    for rule, mode in (("floor", Mode.FLOOR), ("even", Mode.EVEN), ("ceil", Mode.RCEIL)):
        found["mxfp4", rule] = Peer(f"MXTensor {mode.name}", True, mx(e2m1, mode))
    found["mxfp4", "mse"] = even
    found |= {("mxfp4_dualscale", rule): even for rule in ("even", "mse")}
    return found


def codes_of(converted: Any) -> Tensor:
    """The codes of torchao's tensor."""
    return next(getattr(converted, name) for name in ("qdata", "data") if hasattr(converted, name))


def share_of_equal_codes(weight: Tensor, format: str, rule: str, peer: Peer) -> float:
    """Which part of the codes are the same in both, on the first rows; the zeros of e2m1 count as one."""
    some = weight[:512].contiguous()
    ours = torch.ops.olq_fx.quantize(some, format, rule)[0].view(torch.uint8)
    theirs = codes_of(peer.convert(some)).contiguous().view(torch.uint8)
    if FORMATS[format].packed:
        ours, theirs = (torch.stack((codes & 15, codes >> 4)) for codes in (ours, theirs))
        ours, theirs = (codes.masked_fill(codes == 8, 0) for codes in (ours, theirs))
    return (ours == theirs).float().mean().item() if ours.shape == theirs.shape else float("nan")


def copy_of_the_same_bytes(weight: Tensor, format: str) -> Callable[[], object]:
    """A copy that reads and writes as many bytes as the conversion does."""
    written = sum(part.nbytes for part in torch.ops.olq_fx.quantize(weight[:128], format, FORMATS[format].rules[0]))
    count = int((weight.nbytes + written * weight.shape[0] // 128) / 2)
    source = torch.zeros(count, dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def main() -> int:
    """Measure, print, save."""
    options = parser(__doc__)
    options.add_argument("--shape", type=int, nargs=2, default=(4096, 14336), metavar=("N", "K"))
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    weight = torch.randn(arguments.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows, measured = [], []
    for (format, rule), peer in peers().items():

        def convert(format: str = format, rule: str = rule) -> object:
            return torch.ops.olq_fx.quantize(weight, format, rule)

        entries: dict[str, Callable[[], object]] = {
            f"{format} {rule}": convert,
            f"torchao {peer.name}": lambda peer=peer: peer.convert(weight),
            "copy": copy_of_the_same_bytes(weight, format),
        }
        times = interleaved(entries, arguments.rounds, cold_caches())
        ours, theirs, copied = medians(times).values()
        same = share_of_equal_codes(weight, format, rule, peer) if peer.equal else None
        speed, other = (weight.nbytes / each / 1e9 for each in (ours, theirs))
        shown = "" if same is None else f"{same:.2%}"
        star = "" if peer.equal else " *"
        rows.append(
            (
                format,
                rule,
                f"{speed:.2f}",
                f"{other:.2f}",
                f"{theirs / ours:.1f}",
                f"{copied / ours:.0%}",
                peer.name + star,
                shown,
            )
        )
        measured.append(
            {
                "format": format,
                "rule": rule,
                "peer": peer.name,
                "equal_rule": peer.equal,
                "same_codes": same,
                "seconds": times,
            }
        )
    slow = [f"{row[0]} {row[1]} ({row[4]})" for row in rows if float(row[4]) < 5]
    notes = [
        "GB/s of bfloat16 source, medians; `times` is torchao's time over ours; `of a copy` is the speed relative to a "
        "copy that moves the same number of bytes.",
        "* no such rule in torchao: measured against its nearest one.",
        f"Below the aim of five times: {', '.join(slow)}." if slow else "All reach the aim of five times.",
    ]
    title = f"Conversion of a {arguments.shape[0]} x {arguments.shape[1]} bfloat16 weight, caches cold"
    report("conversion", arguments, title, COLUMNS, rows, measured, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
