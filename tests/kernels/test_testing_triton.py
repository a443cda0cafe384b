"""The testing kit for Triton kernels: what it mends, what it catches, what it says of machine code."""

import os

import pytest
import torch
import triton_samples as samples
from hypothesis import given
from hypothesis import strategies as st

from olq_fx.testing import (
    Compiler,
    Interpreter,
    ProcessDied,
    PythonProcess,
    assert_kernel_code,
    assert_kernel_values,
    assert_same_bits,
    machine_code,
)

FLOATS = torch.arange(0, 1 << 32, 65521, dtype=torch.int64).to(torch.int32).view(torch.float32)
NARROW = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[~tensor.isnan()]


def reference_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    value = x.float()
    if dtype.itemsize == 1:
        value = value.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return value.to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_casts_are_those_of_the_hardware(interpreter, source, dtype):
    x = numbers(FLOATS if source == torch.float32 else NARROW.view(source))
    assert_same_bits(interpreter.call(samples.cast, x, dtype), reference_cast(x, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_products_of_floats(interpreter, dtype):
    a, b = (torch.randn(32, 32).to(dtype) for _ in range(2))
    found = interpreter.call(samples.product, a, b, torch.float32)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_products_of_integers_are_exact(interpreter):
    a, b = (torch.randint(-128, 128, (32, 32), dtype=torch.int8) for _ in range(2))
    assert_same_bits(interpreter.call(samples.product, a, b, torch.int32), a.int() @ b.int())


def test_what_is_not_written_shows(interpreter):
    x = torch.randn(100)
    assert interpreter.call(samples.forgetful, x).isnan().nonzero().tolist() == [[99]]
    with pytest.raises(AssertionError, match="1 of 100 elements differ"):
        assert_kernel_values(interpreter, samples.forgetful, torch.clone, x)


def test_an_input_must_stay_as_it_was():
    x = torch.randn(4)
    with pytest.raises(AssertionError, match="arguments after the call"):
        assert_kernel_values(Here(), samples.changes_its_input, torch.zeros_like, x)


class Here:
    """Runs functions in this process."""

    def call(self, function, *args):
        return function(*args)


@pytest.mark.parametrize("kernel", ["unmasked_kernel", "unmasked_atomic_kernel"])
def test_an_access_outside_of_all_tensors_is_an_error(interpreter, kernel):
    x, out = torch.randn(100), torch.zeros(100)
    before = out.clone()
    with pytest.raises(Exception, match=r"28 of 64 addresses of a (load|atomic) are outside"):
        interpreter.launch(getattr(samples, kernel), (2,), x, out, 100, BLOCK=64)
    assert_same_bits(out, before)


def test_a_view_is_the_bound_and_not_its_storage(interpreter):
    x = torch.randn(200)
    with pytest.raises(Exception, match="outside of all tensors"):
        interpreter.launch(samples.unmasked_kernel, (2,), x[:100], torch.zeros(100), 100, BLOCK=64)


def test_a_descriptor_reads_zeros_beyond_its_tensor(interpreter):
    whole = torch.randn(12, 28)
    expected = torch.zeros(16, 16)
    expected[:10, :8] = whole[:10, 16:24]
    assert_same_bits(interpreter.call(samples.second_tile, whole[:10, :24]), expected)


def test_arithmetic_on_bfloat16_is_an_error(interpreter):
    x = torch.randn(64).bfloat16()
    with pytest.raises(Exception, match="cast to float32 after the load"):
        interpreter.launch(samples.bfloat16_kernel, (1,), x, torch.empty_like(x), 64, BLOCK=64)


def test_a_launch_writes_into_what_it_was_given(interpreter):
    x, out = torch.randn(100), torch.full((100,), torch.nan)
    interpreter.launch(samples.cast_kernel, (2,), x, out, 100, BLOCK=64)
    assert_same_bits(out, x)


def test_this_process_is_left_alone(interpreter):
    assert interpreter.call(samples.process) != os.getpid()
    assert interpreter.call(samples.settings)[0]
    assert not torch.are_deterministic_algorithms_enabled()
    assert "TRITON_INTERPRET" not in os.environ


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int8, torch.bool, torch.complex64)


@given(st.sampled_from(DTYPES), st.sampled_from(["plain", "transposed", "step", "expanded", "empty", "scalar"]))
def test_tensors_of_every_dtype_and_layout_travel(interpreter, dtype, layout):
    whole = torch.randn(6, 4).to(dtype)
    made = {
        "plain": whole,
        "transposed": whole.T,
        "step": whole[1::2, ::2],
        "expanded": whole[:1].expand(5, 4),
        "empty": whole[:0],
        "scalar": whole[0, 0],
    }[layout]
    back = interpreter.call(samples.echo, [made, {"x": (made, 1)}])
    assert_same_bits(back, [made, {"x": (made, 1)}])
    assert back[0].stride() == made.stride()


def test_errors_come_back():
    with PythonProcess() as process:
        with pytest.raises(ValueError, match="in there") as error:
            process.call(samples.raises)
        assert "triton_samples.py" in str(error.value.__cause__)
        with pytest.raises(TypeError, match="cannot be found by another process"):
            process.call(lambda: None)
        first = process.call(samples.process)
        with pytest.raises(ProcessDied, match="exit status 3"):
            process.call(samples.dies)
        assert process.call(samples.process) != first


def test_a_call_has_a_time_limit():
    with PythonProcess(timeout=0.5) as process:
        process._timeout = 60.0
        process.call(samples.process)
        process._timeout = 0.5
        with pytest.raises(ProcessDied, match=r"ended after 0\.5 s"):
            process.call(samples.sleeps)


def test_a_setup_that_fails_is_the_error_of_the_first_call():
    with PythonProcess(setup=samples.raises) as process, pytest.raises(ValueError, match="in there"):
        process.call(samples.process)


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def product_args(dtype: torch.dtype):
    return meta(64, 64, dtype=dtype), meta(64, 64, dtype=dtype), meta(64, 64, dtype=torch.float32)


def test_the_code_of_a_product():
    code = machine_code(samples.product_kernel, product_args(torch.float16), {"BLOCK": 64}, 90)
    assert code.name == "product_kernel"
    assert code.registers > 16
    assert code.shared_memory > 0
    code.assert_instruction("wgmma.*f16")
    code.assert_no_spills()
    with pytest.raises(AssertionError, match=r"product_kernel on sm_90 has wgmma.*, not e4m3"):
        code.assert_instruction("e4m3")
    codes = assert_kernel_code(
        samples.product_kernel, product_args(torch.float16), {"BLOCK": 64}, {80: r"mma\.sync.*f16", 90: "wgmma.*f16"}
    )
    assert [found.capability for found in codes] == [80, 90]


def test_the_code_of_a_kernel_with_a_descriptor():
    args = (samples.descriptor(torch.empty(64, 64, device="meta")), torch.empty(16, 16, device="meta"))
    code = machine_code(samples.descriptor_kernel, args, {"BLOCK": 16}, 90)
    assert "UTMALDG" in code.sass
    with Compiler() as compiler:
        there = compiler.machine_code(samples.descriptor_kernel, args, {"BLOCK": 16}, 90)
    assert there.registers == code.registers


def test_code_without_a_product():
    args = (meta(64, dtype=torch.bfloat16), meta(64, dtype=torch.float8_e4m3fn), 64)
    assert_kernel_code(samples.cast_kernel, args, {"BLOCK": 64}, {90: ""})
    with pytest.raises(AssertionError, match="has no matrix instruction"):
        assert_kernel_code(samples.cast_kernel, args, {"BLOCK": 64}, {90: "wgmma"})
    with pytest.raises(AssertionError, match="has wgmma"):
        assert_kernel_code(samples.product_kernel, product_args(torch.float16), {"BLOCK": 64}, {90: ""})


def test_spills_and_shared_memory_are_seen():
    args = (
        meta(256, 4096, dtype=torch.float32),
        meta(256, 4096, dtype=torch.float32),
        meta(256, 256, dtype=torch.float32),
    )
    code = machine_code(samples.deep_kernel, (*args, 4096), {"BLOCK": 128}, 80, num_warps=1)
    with pytest.raises(AssertionError, match=r"bytes of stack|accesses local memory"):
        code.assert_no_spills()
    wide = machine_code(samples.deep_kernel, (*args, 4096), {"BLOCK": 128}, 89, num_warps=8, num_stages=4)
    with pytest.raises(AssertionError, match=r"wants \d+ bytes of shared memory; sm_89 has 101376"):
        wide.assert_fits()


def test_wrong_arguments_are_named():
    args = product_args(torch.float16)
    with pytest.raises(TypeError, match="the kernel takes a, b, out; given 2 arguments"):
        machine_code(samples.product_kernel, args[:2], {"BLOCK": 64}, 90)
    with pytest.raises(TypeError, match="BLOK"):
        machine_code(samples.product_kernel, args, {"BLOK": 64}, 90)
    with pytest.raises(TypeError, match="the argument out has no type in Triton"):
        machine_code(samples.product_kernel, (*args[:2], "x"), {"BLOCK": 64}, 90)
    with pytest.raises(TypeError, match="is no kernel to compile"):
        machine_code(samples.cast, args, {"BLOCK": 64}, 90)


def test_a_compiler_in_another_process():
    with Compiler() as compiler:
        args = product_args(torch.float16)
        there = compiler.machine_code(samples.product_kernel, args, {"BLOCK": 64}, 90)
        assert there.instructions == machine_code(samples.product_kernel, args, {"BLOCK": 64}, 90).instructions
        with pytest.raises(ProcessDied):
            compiler.call(samples.dies)
        assert compiler.machine_code(samples.product_kernel, args, {"BLOCK": 64}, 90) == there


def test_an_interpreter_is_a_process_of_its_own():
    with Interpreter() as one, Interpreter() as other:
        assert one.call(samples.process) != other.call(samples.process)
