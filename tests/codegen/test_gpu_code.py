"""What Inductor emits for an NVIDIA GPU, in a process of its own that takes one for present."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from olq_fx.elements import ELEMENT_MAX
from olq_fx.scales import NVFP4_RANGE

PROGRAM = """
import contextlib, sys
from unittest import mock
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from olq_fx import torch_private
from olq_fx.formats import FORMATS
from olq_fx.inner import Inner
from olq_fx.testing_gpu import GpuCodeCompiled, on_gpu

def emitted(format, **patches):
    def quantize(x):
        return torch.ops.olq_fx.quantize(x, format, FORMATS[format].activation_rule)

    torch.compiler.reset()
    compiled = torch.compile(quantize, backend=on_gpu(Inner.of("inductor").compile, 90))
    def call():
        with contextlib.suppress(GpuCodeCompiled):
            compiled(torch.zeros(64, 512, dtype=torch.bfloat16))
            raise AssertionError("it ran")
    [source] = torch_private.inductor_sources(call)
    return source
"""


def run(program: str, folder: Path, *arguments: str) -> str:
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM + program, *arguments]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | caches | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_no_scale_is_a_product_with_a_rounded_reciprocal(tmp_path: Path):
    """Inductor would write `amax * (1 / 448)`, which is another number than `amax / 448` for one amax in four."""
    sources = run(
        """
for name, format in FORMATS.items():
    if format.activation:
        with mock.patch.object(CachingAutotuner, "precompile", lambda self, *args, **kwargs: None):
            print("=====", name, emitted(name), sep="\\n")
""",
        tmp_path,
    )
    emitted = dict(re.findall(r"=====\n(\w+)\n(.*?)(?=\n=====|\Z)", sources, re.DOTALL))
    assert {"fp8_per_token", "fp8_per_block_dynamic", "int8_per_token", "mxfp8", "nvfp4_per_token"} <= emitted.keys()
    for name, source in emitted.items():
        assert "@triton.jit" in source, name
        for limit in (*ELEMENT_MAX.values(), NVFP4_RANGE):
            assert f"{1 / limit!r}" not in source, f"{name} multiplies by 1 / {limit}"


def test_machine_code_is_there_without_a_gpu(tmp_path: Path):
    run('emitted("fp8_per_token")', tmp_path)
    [*codes] = (tmp_path / "triton").rglob("*.ptx")
    assert codes
    for code in codes:
        text = code.read_text()
        assert ".target sm_90a" in text
        assert "div.rn.f32" in text
        assert "cvt.rn.satfinite.e4m3x2.f32" in text
        assert code.with_suffix(".cubin").stat().st_size


CACHED = """
import json
import fused_models
import olq_fx
from torch._dynamo.utils import counters
from olq_fx.inner import Inner

scheme, = sys.argv[1:]
model, inputs = fused_models.feed_forward()
fast = torch.compile(model, backend=olq_fx.backend(scheme, inner=on_gpu(Inner.of("inductor").compile, 90)))
with contextlib.suppress(GpuCodeCompiled), torch.no_grad():
    fast(*inputs)
print(json.dumps({name: count for name, count in counters["inductor"].items() if name.startswith("fxgraph_cache")}))
"""


@pytest.mark.slow
def test_a_second_process_takes_fused_kernels_from_the_cache(tmp_path: Path):
    """And another scheme finds nothing there."""
    found = [json.loads(run(CACHED, tmp_path, scheme).splitlines()[-1]) for scheme in ("mxfp8", "mxfp8", "mxfp4")]
    assert found == [{"fxgraph_cache_miss": 1}, {"fxgraph_cache_hit": 1}, {"fxgraph_cache_miss": 1}]
