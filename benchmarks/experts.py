"""Latency of the experts of one layer in every scheme, against bfloat16 as `grouped_mm` and as `eager` loop.

All entries of one number of tokens are measured in turn, in eager mode, quantized ones through `use_experts`. The aim:
at 1 token no scheme of weights alone is slower than the faster of the two bfloat16 forms.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import interleaved, medians, parser, report
from torch import Tensor, nn

import olq_fx
from olq_fx.integrations.transformers import use_experts
from olq_fx.optional_packages import load_transformers
from olq_fx.schemes import SCHEMES

COLUMNS = ("entry", "tokens", "ms", "over grouped_mm", "over eager", "aim")
PLAIN = ("grouped_mm", "eager")
QUICK = ("int8", "fp8_per_block", "mxfp4", *(name for name in SCHEMES if name.endswith("weight_only")))


def model_of(experts: int, hidden: int, inner: int, top: int) -> Any:
    """A model of one layer in bfloat16, without gradients."""
    transformers = load_transformers()
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=top,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
    )
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def experts_of(model: Any) -> nn.Module:
    """Its module of experts."""
    found: nn.Module = model.model.layers[0].mlp.experts
    return found


def modules(model: Any, schemes: list[str]) -> dict[str, nn.Module]:
    """The entries by name."""
    found: dict[str, nn.Module] = {}
    for form in PLAIN:
        one = copy.deepcopy(model)
        one.set_experts_implementation(form)
        found[form] = experts_of(one)
    for scheme in schemes:
        one = copy.deepcopy(model)
        olq_fx.quantize_(one, {"moe": scheme})
        if refused := use_experts(one):
            raise AssertionError(f"{scheme}: {refused}")
        found[scheme] = experts_of(one)
    return found


def calls_of(found: dict[str, nn.Module], inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Callable[[], object]]:
    """The calls to measure, each close to bfloat16."""
    expected = found["eager"](*inputs).float()
    for name, module in found.items():
        noise = float((module(*inputs).float() - expected).norm() / expected.norm())
        if not noise < 0.45:
            raise AssertionError(f"{name} is {noise:.2f} away from bfloat16: not worth measuring")
    return {name: lambda module=module: module(*inputs) for name, module in found.items()}  # type: ignore[misc]


def row_of(name: str, tokens: int, times: dict[str, float]) -> tuple[tuple[str, ...], bool]:
    """The cells of one entry, and whether it misses its aim."""
    cells = (name, str(tokens), f"{1e3 * times[name]:.2f}", *(f"{times[name] / times[plain]:.2f}" for plain in PLAIN))
    if name in PLAIN or SCHEMES[name].moe.activation or tokens > 1:
        return (*cells, ""), False
    reached = times[name] <= min(times[plain] for plain in PLAIN)
    return (*cells, "reached" if reached else "MISSED"), not reached


def main() -> int:
    """Measure, print, save."""
    options = parser(__doc__)
    options.add_argument("--sizes", type=int, nargs=4, default=(32, 1024, 512, 4), metavar=("E", "H", "I", "TOP"))
    options.add_argument("--tokens", type=int, nargs="+", default=(1, 16, 256), help="of a call (default 1 16 256)")
    options.add_argument("--schemes", nargs="+", default=list(QUICK), choices=list(SCHEMES), metavar="SCHEME")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    experts, hidden, inner, top = arguments.sizes
    rows, measured, missed = [], [], []
    with torch.no_grad():
        found = modules(model_of(experts, hidden, inner, top), arguments.schemes)
        for tokens in arguments.tokens:
            weights, ids = torch.topk(torch.randn(tokens, experts).softmax(-1), top)
            x = torch.randn(tokens, hidden).bfloat16()
            inputs = (x, ids, (weights / weights.sum(-1, keepdim=True)).bfloat16())
            rounds = arguments.rounds if tokens > 16 else 5 * arguments.rounds
            times = interleaved(calls_of(found, inputs), rounds)
            for name in found:
                cells, misses = row_of(name, tokens, medians(times))
                rows.append(cells)
                measured.append({"entry": name, "tokens": tokens, "seconds": times[name], "aim_missed": misses})
                if misses:
                    missed.append(name)
    notes = [f"Missed at 1 token: {', '.join(missed)}." if missed else "Every scheme of weights alone reaches its aim."]
    title = f"One layer of {experts} experts, top {top}, hidden {hidden}, inner {inner}, bfloat16, medians"
    report("experts", arguments, title, COLUMNS, rows, measured, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
