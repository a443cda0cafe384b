"""The backend with Inductor: settings of one compilation, caches across processes, gradients."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

import olq_fx
from olq_fx import torch_private

PROGRAM = """
import json, sys, torch
import olq_fx
from olq_fx import inner
from torch._dynamo.utils import counters

scheme, changed = sys.argv[1:]
if changed == "sources":
    inner.sources = lambda: "other sources"
keys = {"ignore": ["nothing"], "strict": False} if changed == "options" else {}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
with torch.no_grad():
    y = torch.compile(model, backend=olq_fx.backend(scheme, **keys))(torch.ones(2, 64))
hits = {"fx": counters["inductor"]["fxgraph_cache_hit"], "aot": counters["aot_autograd"]["autograd_cache_hit"]}
print(json.dumps([hits, y.tolist()]))
"""


def in_a_process(folder: Path, scheme: str, changed: str = "") -> tuple[dict[str, int], Any]:
    import os

    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", PROGRAM, scheme, changed]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    hits, result = json.loads(done.stdout.splitlines()[-1])
    return hits, result


def test_second_process_hits_the_caches_and_nothing_stale_is_served(tmp_path: Path):
    first, expected = in_a_process(tmp_path, "mxfp8")
    assert first == {"fx": 0, "aot": 0}
    again, result = in_a_process(tmp_path, "mxfp8")
    assert again["aot"] == 1
    assert result == expected
    for changed in ("sources", "options"):
        hits, result = in_a_process(tmp_path, "mxfp8", changed)
        assert hits == {"fx": 0, "aot": 0}, changed
        assert result == expected


def test_settings_are_those_of_one_compilation(monkeypatch: pytest.MonkeyPatch):
    """Also while a backward is compiled, which happens later."""
    seen: list[tuple[bool, bool, bool]] = []
    from torch._inductor import compile_fx

    original = compile_fx.compile_fx_inner

    def spy(*args: Any, **kwargs: Any) -> Any:
        numerics = inductor_config.eager_numerics.division_rounding
        seen.append((inductor_config.emulate_precision_casts, numerics, inductor_config.cpp.enable_kernel_profile))
        return original(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spy)
    before = repr(sorted(inductor_config.get_config_copy().items(), key=lambda pair: pair[0]))
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(4, 32, requires_grad=True)
    compiled = torch.compile(model, backend=olq_fx.backend("int8"), options={"cpp.enable_kernel_profile": True})
    compiled(x).square().sum().backward()
    assert seen == [(True, True, True)] * 2
    assert repr(sorted(inductor_config.get_config_copy().items(), key=lambda pair: pair[0])) == before
    gradient = torch.autograd.grad(model(y := x.detach().requires_grad_()).square().sum(), y)[0]
    torch.testing.assert_close(x.grad, gradient, rtol=1e-4, atol=1e-4)


def test_modes_of_torch_compile_are_inductors():
    assert torch_private.mode_options(None) == torch_private.mode_options("default") == {}
    assert torch_private.mode_options("max-autotune-no-cudagraphs")["max_autotune"] is True
