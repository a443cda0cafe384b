"""How long torch.compile takes through our backend, against torch.compile of the same unquantized model.

Twelve decoder layers, bfloat16, caches cold: each measurement is a process of its own with cache folders of its own,
all entries are taken in turn, medians. Two kinds of code: C++ for this CPU, and machine code for sm_90 (NVIDIA Hopper),
which needs no GPU because nothing is launched. There the weights are converted on the CPU all the same, and Triton
compiles one kernel after another in this process. Building our CPU kernels, once a machine, is not part of it.

`passes` is all that the backend does beside the inner compiler: plan, conversion, rewriting. Limits: passes at most 10%
of plain torch.compile; in all at most 2 times for C++, 1.3 times for sm_90. Exit code 1 if one is exceeded.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import medians, parser, report
from demo_common import progress
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import olq_fx
from olq_fx.dynamo import Backend
from olq_fx.inner import Inner
from olq_fx.schemes import SCHEMES
from olq_fx.testing_gpu import GpuCodeCompiled, on_gpu

COLUMNS = ("code", "entry", "seconds", "over plain", "passes, s", "passes over plain", "limits")
LIMITS = {"cpu": 2.0, "sm_90": 1.3}
LIMIT_OF_PASSES = 0.10
PLAIN = "torch.compile"
SCHEMES_MEASURED = ("fp8_per_block", "mxfp8", "int8", "mxfp4", "nvfp4_per_token", "mxfp4_dualscale")
"""One for each way to quantize activations, which is what there is to compile."""

TOKENS = 32


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, (B, H, T, D) each."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operator that `attention` is on such a GPU: torch chooses it by asking the device."""
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return attended


class Norm(nn.Module):
    """RMSNorm as model libraries write it."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    """A decoder layer: (B, T, d) -> (B, T, d), with the attention of a device."""

    def __init__(self, d: int, hidden: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm, self.ffn_norm = Norm(d), Norm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in 2 * [(d, hidden)] + [(hidden, d)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(self.attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def model(layers: int, code: str) -> nn.Module:
    """The model that is compiled."""
    chosen = attention if code == "cpu" else flash_attention
    with torch.device("meta"):
        made = nn.Sequential(*(Layer(1024, 2816, 16, chosen) for _ in range(layers))).bfloat16()
    made.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(std=0.02, generator=generator)
    return made.eval().requires_grad_(False)


def backend_of(code: str, entry: str) -> Callable[..., Any] | str:
    """What torch.compile is given for an entry."""
    if code == "cpu":
        return "inductor" if entry == PLAIN else olq_fx.backend(entry)
    from torch._inductor.compile_fx import compile_fx

    if entry == PLAIN:
        return on_gpu(compile_fx, 90)
    return olq_fx.backend(entry, inner=on_gpu(Inner.of("inductor").compile, 90))


class Clock:
    """Adds up how long calls of a function take; calls within its calls are part of them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.running = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.running:
                return function(*args, **kwargs)
            self.running, start = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.running = False
                self.seconds += time.perf_counter() - start

        return timed


def measure(code: str, entry: str, layers: int) -> dict[str, float]:
    """One compilation in this process: seconds in all, and of our backend without the inner compiler."""
    compiled_model, x = model(layers, code), torch.randn(1, TOKENS, 1024).bfloat16()
    with torch.no_grad():
        warm = nn.Sequential(nn.Linear(64, 64)).bfloat16()
        if entry != PLAIN:
            olq_fx.quantize_(warm, entry)  # builds our kernels for CPUs if this machine has not built them yet
        warm(torch.randn(TOKENS, 64).bfloat16())
        torch.compile(lambda t: t + 1, backend="eager")(torch.ones(1))  # imports Dynamo
        ours, inner = Clock(), Clock()
        with (
            mock.patch.object(Backend, "__call__", ours.around(Backend.__call__)),
            mock.patch.object(Inner, "compile", inner.around(Inner.compile)),
        ):
            run = torch.compile(compiled_model, backend=backend_of(code, entry), dynamic=False)
            start = time.perf_counter()
            with contextlib.suppress(GpuCodeCompiled):
                run(x)
            return {"seconds": time.perf_counter() - start, "passes": ours.seconds - inner.seconds}


def in_a_process(code: str, entry: str, layers: int, threads: int) -> dict[str, float]:
    """`measure` with cold caches."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor")),
            "TRITON_CACHE_DIR": str(Path(folder, "triton")),
            "OMP_NUM_THREADS": str(threads),
        }
        command = [sys.executable, __file__, "--one", code, entry, "--layers", str(layers)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{entry} for {code} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def row_of(code: str, entry: str, found: dict[str, float], plain: float, passes: float) -> tuple[tuple[str, ...], bool]:
    """The cells of one entry, and whether it exceeds a limit."""
    cells = (code, entry, f"{found[entry]:.1f}", f"{found[entry] / plain:.2f}")
    if entry == PLAIN:
        return (*cells, "", "", ""), False
    over = [
        name
        for name, value, limit in (
            (f"in all {LIMITS[code]}", found[entry] / plain, LIMITS[code]),
            (f"passes {LIMIT_OF_PASSES:.0%}", passes / plain, LIMIT_OF_PASSES),
        )
        if value > limit
    ]
    kept = f"EXCEEDED: {', '.join(over)}" if over else "kept"
    return (*cells, f"{passes:.2f}", f"{passes / plain:.1%}", kept), bool(over)


def table_of(code: str, times: dict[str, list[dict[str, float]]]) -> tuple[list[tuple[str, ...]], list[Any], bool]:
    """The rows of one kind of code, what goes into the JSON file, and whether a limit is exceeded."""
    seconds = medians({entry: [one["seconds"] for one in seen] for entry, seen in times.items()})
    passes = medians({entry: [one["passes"] for one in seen] for entry, seen in times.items()})
    rows, measured, exceeded = [], [], False
    for entry, seen in times.items():
        cells, over = row_of(code, entry, seconds, seconds[PLAIN], passes[entry])
        rows.append(cells)
        measured.append({"code": code, "entry": entry, "measurements": seen, "limit_exceeded": over})
        exceeded |= over
    return rows, measured, exceeded


def main() -> int:
    """Measure, print, save."""
    options = parser(__doc__)
    options.set_defaults(rounds=3)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--schemes", nargs="+", default=SCHEMES_MEASURED)
    options.add_argument("--code", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    options.add_argument("--one", nargs=2, metavar=("CODE", "ENTRY"), help="measure once, here, and print JSON")
    arguments = options.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one, arguments.layers)))
        return 0
    if unknown := set(arguments.schemes) - set(SCHEMES):
        options.error(f"no such scheme: {', '.join(sorted(unknown))}")
    entries = [PLAIN, *arguments.schemes]
    times: dict[str, dict[str, list[dict[str, float]]]] = {code: {e: [] for e in entries} for code in arguments.code}
    with progress() as bar:
        task = bar.add_task("", total=arguments.rounds * len(entries) * len(arguments.code))
        for _ in range(arguments.rounds):
            for code in arguments.code:
                for entry in entries:
                    bar.update(task, description=f"{entry}, {code}", advance=1)
                    times[code][entry].append(in_a_process(code, entry, arguments.layers, arguments.threads))
    rows: list[tuple[str, ...]] = []
    measured: list[Any] = []
    exceeded = False
    for code in arguments.code:
        found = table_of(code, times[code])
        rows, measured, exceeded = [*rows, *found[0]], [*measured, *found[1]], exceeded or found[2]
    notes = [f"Limits: in all {LIMITS} times, passes {LIMIT_OF_PASSES:.0%} of plain torch.compile; caches cold."]
    title = f"Compilation of {arguments.layers} decoder layers of width 1024, bfloat16, medians"
    report("compile_time", arguments, title, COLUMNS, rows, measured, notes)
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
