"""The native kernels built for less than this machine: equal codes, and products within the bound at every level."""

import json
import os
import platform
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from olq_fx.kernels import build

LEVELS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512bw"}
"""What the compiler is told to build for, and the flag of /proc/cpuinfo that says that it runs here."""

PROGRAM = textwrap.dedent(
    """
    import hashlib, json
    import torch
    from olq_fx import numerics
    from olq_fx.formats import FORMATS
    from olq_fx.kernels import native, ops
    from olq_fx.testing import assert_product_close, assert_same_bits

    generator = torch.Generator().manual_seed(0)
    digest, products = hashlib.sha256(), 0
    assert native.why_not() == ""
    for name, fmt in FORMATS.items():
        for n, k in ((19, 31), (17, 33), (20, 1100)):
            parts = torch.ops.olq_fx.quantize(torch.randn(n, k, generator=generator), name, fmt.rules[0])
            for part in parts:
                digest.update(part.view(torch.uint8).numpy().tobytes())
            w = numerics.dequantize(tuple(parts), fmt, k)
            assert_same_bits(torch.ops.olq_fx.dequantize(parts, name, k, torch.float32), w)
            if not fmt.weight:
                continue
            x = torch.randn(20, k, generator=generator)
            x[1, 7] = 1e-38
            spoiled = [part.clone() for part in parts]
            spoiled[0].view(torch.uint8)[3, k // 3] = 0xFF
            row = numerics.dequantize(tuple(spoiled), fmt, k)
            for m in (1, 2, 4, 8, 20):
                for given, seen in ((parts, w), (spoiled, row)):
                    y = torch.ops.olq_fx.quantized_linear([x[:m]], "", given, name, k, torch.float32, None, None)
                    assert_product_close(y, x[:m], seen)
                    products += 1
    print(json.dumps([digest.hexdigest(), products]))
    """
)


def run(**environment: str) -> object:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def _runs_here(level: str) -> bool:
    if platform.machine() not in ("x86_64", "AMD64") or not Path("/proc/cpuinfo").exists():
        return False
    return LEVELS[level] in build._cpu_features().split()


@pytest.fixture(scope="module")
def expected() -> object:
    return run()


@pytest.mark.parametrize("level", LEVELS)
def test_built_for_another_level(level: str, expected: object, tmp_path: Path) -> None:
    if not _runs_here(level):
        pytest.skip(f"this machine does not run code for {level}")
    compiler = tmp_path / "c++"
    # The last architecture that a compiler is told counts.
    compiler.write_text(f'#!/bin/sh\nexec {shlex.join(build._compiler())} "$@" -O1 -march={level}\n')
    compiler.chmod(0o700)
    assert run(CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path)) == expected
