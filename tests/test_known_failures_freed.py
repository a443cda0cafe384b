"""After the backend has freed the originals. Number 29: each operation in a process of its own.

A crash of the process, a NaN or an empty file would be the failure. Every operation runs after a compiled model has
freed its originals, and gives a right value or an error that names the parameter.
"""

import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import copy, gc, io, os, pickle, sys, tempfile, warnings
import torch
from torch import nn
import olq_fx
from olq_fx.testing import assert_same_bits, assert_sqnr, live_bytes, sqnr

scheme, tied = sys.argv[1], sys.argv[2] == "tied"
torch.manual_seed(0)
torch.set_num_threads(1)  # a child made by fork has no threads but its own
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
if tied:
    model[2].weight = model[0].weight
x = torch.randn(4, 64)
with torch.no_grad():
    original = model(x)
compiled = torch.compile(model, backend=olq_fx.backend(scheme, inner="eager"))
with torch.no_grad():
    expected = compiled(x)
gc.collect()
assert live_bytes(model) < (1 if tied else 2) * 64 * 64 * 4, "the originals are alive"

def same(callable, x=x, expected=expected):
    with torch.no_grad():
        assert_same_bits(callable(x), expected)
"""

OPERATIONS = {
    "eager call": "same(model)",
    "state_dict": """
        state = model.state_dict()
        assert all(value.isfinite().all() for value in state.values() if value.dtype == torch.float32)
        fresh = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        if tied:
            fresh[2].weight = fresh[0].weight
        olq_fx.quantize_(fresh, scheme)
        fresh.load_state_dict(state)
        same(fresh)
    """,
    "save and load": """
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.pt")
            torch.save(model.state_dict(), path)
            size = os.path.getsize(path)
            assert size > live_bytes(model) // (2 if tied else 1), f"a file of {size} bytes"
            model.load_state_dict(torch.load(path, weights_only=True))
        same(model)
        same(compiled)
    """,
    "save the whole model": """
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        same(torch.load(buffer, weights_only=False))
    """,
    "deepcopy": "same(copy.deepcopy(model)); same(model); same(compiled)",
    "deepcopy of the compiled model": "same(copy.deepcopy(compiled))",
    "pickle": "same(pickle.loads(pickle.dumps(model)))",
    "to cpu": "same(model.to('cpu')); same(compiled)",
    "to dtype": """
        model.to(torch.bfloat16)
        with torch.no_grad():
            y = model(x.bfloat16())
            assert_same_bits(compiled(x.bfloat16()), y)
        assert y.dtype == torch.bfloat16
        # Inputs rounded to bfloat16 change few of the codes: less than quantization changed.
        assert_sqnr(y.float(), expected, sqnr(expected, original))
    """,
    "clone of a weight": """
        assert_same_bits(model[0].weight.clone().dequantize(), model[0].weight.dequantize())
        assert_same_bits(model[0].weight.detach().dequantize(), model[0].weight.dequantize())
    """,
    "new batch shapes": """
        for batch in (1, 9, 4, 33):
            y = torch.randn(batch, 64)
            with torch.no_grad():
                assert_same_bits(compiled(y), model(y))
        same(compiled)
    """,
    "a second compile": """
        same(torch.compile(model, backend="eager"))
        torch.compiler.reset()
        same(torch.compile(model, backend=olq_fx.backend(scheme, inner="eager")))
        torch.compiler.reset()
        same(compiled)
    """,
    "load originals again": """
        originals = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        if tied:
            originals[2].weight = originals[0].weight
        pointers = [part.data_ptr() for part in model[0].weight.parts]
        model.load_state_dict(originals.state_dict())
        assert pointers == [part.data_ptr() for part in model[0].weight.parts]
        olq_fx.quantize_(originals, scheme)
        with torch.no_grad():
            assert_same_bits(model(x), originals(x))
            assert_same_bits(compiled(x), originals(x))
    """,
    "dequantize_": """
        values = model[0].weight.dequantize()
        olq_fx.dequantize_(model)
        assert type(model[0].weight) is nn.Parameter
        assert_same_bits(model[0].weight.detach(), values)
        assert (model[2].weight is model[0].weight) == tied
        with torch.no_grad():
            y = compiled(x)
        assert y.isfinite().all()
    """,
    "gradients": """
        y = x.clone().requires_grad_()
        model(y).sum().backward()
        assert y.grad.isfinite().all()
        z = x.clone().requires_grad_()
        compiled(z).sum().backward()
        assert_same_bits(z.grad, y.grad)
    """,
    "a weight replaced by hand": """
        model[0].weight = nn.Parameter(torch.randn(64, 64))
        with torch.no_grad():
            y = compiled(x)  # converts it like the one that was there
            assert type(model[0].weight) is olq_fx.QuantizedWeight
            assert_same_bits(y, model(x))
    """,
    "inference_mode": """
        with torch.inference_mode():
            assert_same_bits(model(x), expected)
            assert_same_bits(compiled(x), expected)
    """,
    "garbage": """
        weight = model[0].weight
        del model, compiled
        gc.collect()
        assert weight.dequantize().isfinite().all()
    """,
}

# A process start costs seconds, a fork of one that has compiled and freed does not: each operation has its own child.
DRIVER = """
import traceback
operations = {operations!r}
failures = []
for name, code in operations.items():
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            exec(code, globals())
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    _, status = os.waitpid(child, 0)
    if status:
        failures.append(f"{{name}}: " + (f"signal {{os.WTERMSIG(status)}}" if os.WIFSIGNALED(status) else "failed"))
print("ran", len(operations))
if failures:
    sys.exit("; ".join(failures))
"""


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("scheme", ["fp8_per_block", "mxfp4_dualscale", "nvfp4_per_token", "int8", "mxfp8_weight_only"])
def test_29_whatever_comes_after_the_originals_are_freed(scheme, tied):
    operations = {name: textwrap.dedent(code) for name, code in OPERATIONS.items()}
    program = PRELUDE + DRIVER.format(operations=operations)
    done = subprocess.run(
        [sys.executable, "-c", program, scheme, "tied" if tied else "untied"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.split() == ["ran", str(len(OPERATIONS))]
