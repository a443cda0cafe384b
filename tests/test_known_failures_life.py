"""What happens to a model after it is quantized. Numbers 24, 26, 27, 30 and 32."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import safetensors.torch
import torch
from torch import nn

import olq_fx
from olq_fx.formats import FORMATS
from olq_fx.numerics import quantized_bytes
from olq_fx.schemes import SCHEMES
from olq_fx.testing import (
    RecordingBackend,
    assert_layer_close,
    assert_same_bits,
    live_bytes,
    model_case,
    record_allocations,
    storage_census,
)

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)

# The contract allows 64 MiB of temporaries; a third of it keeps this test small.
TEMPORARIES = 22 * 2**20


@pytest.mark.parametrize("scheme", ["int8", "mxfp4"])
def test_24_peak_memory_is_one_converted_layer(scheme):
    """All converted layers together would exceed what is allowed, and copies of the originals all the more."""
    rows, columns, layers = 1024, 4096, 8 if scheme == "int8" else 16
    with record_allocations() as allocations:
        model = nn.Sequential(*(nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
        with allocations.mark("quantize"):
            olq_fx.quantize_(model, scheme)
    one = quantized_bytes(FORMATS[SCHEMES[scheme].linear.weight], rows, columns)
    before = allocations.at_start("quantize")
    assert before >= layers * rows * columns * 2
    assert layers * one > one + TEMPORARIES
    assert allocations.peak("quantize") - before <= one + TEMPORARIES
    assert allocations.at_end("quantize") - layers * one in range(2**20)
    assert live_bytes(model) == layers * one


@every_scheme
@pytest.mark.parametrize("name", ["conv1d", "attention", "llama_block"])
def test_24_no_original_storage_is_alive(route, scheme, name):
    case = model_case(name, torch.bfloat16)
    weights = set(case.weights)
    originals = {
        path: (weakref.ref(parameter), parameter.untyped_storage().data_ptr(), parameter.nbytes)
        for path, parameter in case.model.named_parameters()
        if path in weights
    }
    sizes = {record.pointer: record.bytes for record in storage_census(case.model).values()}
    parameters = live_bytes(case.model)
    quantized = route(case.model, scheme, *case.args)
    gc.collect()
    assert [path for path, (reference, _, _) in originals.items() if reference() is not None] == []
    census = storage_census()
    for path, (_, pointer, size) in originals.items():
        # The allocator may give the same address to a new tensor; that one then has another size.
        assert pointer not in census or census[pointer].bytes != size or sizes[pointer] != size, path
    plan = quantized.report.plan
    saved = sum(plan.lookup(path).bytes_before - plan.lookup(path).bytes_after for path in case.weights)
    assert live_bytes(case.model) == parameters - saved


@every_scheme
@pytest.mark.parametrize("name", ["conv1d", "attention"])
def test_26_state_dict_through_files_is_bit_exact(route, scheme, name, tmp_path):
    case = model_case(name, torch.bfloat16)
    other = model_case(name, torch.bfloat16, seed=1)
    quantized, target = route(case.model, scheme, *case.args), route(other.model, scheme, *case.args)
    state = case.model.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())

    safetensors.torch.save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "m.safetensors")
    from_safetensors = safetensors.torch.load_file(tmp_path / "m.safetensors")
    torch.save(state, tmp_path / "m.pt")
    from_torch = torch.load(tmp_path / "m.pt", weights_only=True)
    for loaded in (from_safetensors, from_torch):
        assert set(loaded) == set(state)
        for key, value in state.items():
            assert_same_bits(loaded[key], value, name=key)
        target.model.load_state_dict(model_case(name, torch.bfloat16, seed=1).model.state_dict())
        result = target.model.load_state_dict(loaded, strict=True)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        for path in case.weights:
            assert_same_bits(target.model.get_parameter(path), case.model.get_parameter(path), name=path)
        assert_same_bits(target(*case.args), quantized(*case.args))


@every_scheme
def test_26_strict_both_ways(scheme):
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    olq_fx.quantize_(model, scheme)
    for key in [key for key in model.state_dict() if not key.endswith("bias")]:
        missing = {name: value for name, value in model.state_dict().items() if name != key}
        with pytest.raises(RuntimeError, match=f"Missing key.*{key}"):
            model.load_state_dict(missing)
        assert model.load_state_dict(missing, strict=False).missing_keys == [key]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.weight_other"):
        model.load_state_dict({**model.state_dict(), "0.weight_other": torch.ones(1)})


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("int8", "fp8_per_channel"), ("mxfp8", "mxfp4"), ("mxfp4", "nvfp4_per_token"), ("fp8", "fp8_per_block")],
)
def test_26_the_wrong_scheme_is_a_clear_error(saved, loaded):
    source, target = (nn.Sequential(nn.Linear(256, 256)) for _ in range(2))
    olq_fx.quantize_(source, saved)
    olq_fx.quantize_(target, loaded)
    before = target[0].weight.dequantize().clone()
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        target.load_state_dict(source.state_dict())
    assert_same_bits(target[0].weight.dequantize(), before)


@every_scheme
def test_26_pickle_deepcopy_and_whole_model_files(route, scheme):
    case = model_case("linear_stack")
    quantized = route(case.model, scheme, *case.args)
    expected = quantized(*case.args)
    buffer = io.BytesIO()
    torch.save(case.model, buffer)
    buffer.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(case.model),
        "pickle": pickle.loads(pickle.dumps(case.model)),
        "torch.save": torch.load(buffer, weights_only=False),
    }
    for name, again in copies.items():
        for path in case.weights:
            assert_same_bits(again.get_parameter(path), case.model.get_parameter(path), name=f"{name}: {path}")
            assert again.get_parameter(path).codes.data_ptr() != case.model.get_parameter(path).codes.data_ptr()
        with torch.no_grad():
            assert_same_bits(again(*case.args), expected, name=name)


CASTS = {
    "to cpu": lambda model: model.to("cpu"),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "float": lambda model: model.float(),
    "double": lambda model: model.double(),
    "to dtype": lambda model: model.to(torch.bfloat16),
}


@every_scheme
@pytest.mark.parametrize("inference", [False, True])
def test_27_casts_keep_codes_and_scales(route, scheme, inference):
    quantized = nn.Sequential(nn.Linear(64, 32))
    x = torch.randn(3, 64)
    route(quantized, scheme, x)
    before = quantized[0].weight.parts
    for name, cast in CASTS.items():
        model = copy.deepcopy(quantized)
        with torch.inference_mode(inference), torch.no_grad():
            cast(model)
            assert_same_bits(model[0].weight.parts, before, name=name)
            dtype = model[0].bias.dtype
            assert model[0].weight.dtype == dtype
            y = model(x.to(dtype))
            assert y.dtype == dtype
            if dtype != torch.float64:
                assert_layer_close(y, x.to(dtype), model[0].weight, model[0].bias)


@every_scheme
def test_27_to_meta_and_back_by_load_state_dict(scheme):
    model = nn.Sequential(nn.Linear(64, 32))
    olq_fx.quantize_(model, scheme)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(3, 64)
    with torch.no_grad():
        expected = model(x)
    model.to("meta")
    assert all(part.is_meta for part in model[0].weight.parts)
    assert [part.dtype for part in model[0].weight.parts] == [
        value.dtype for key, value in state.items() if not key.endswith("bias")
    ]
    model.load_state_dict(state, assign=True)
    with torch.no_grad():
        assert_same_bits(model(x), expected)


@every_scheme
@pytest.mark.parametrize("name", ["linear_stack", "attention"])
def test_30_quantize_after_torch_compile_and_before_is_the_same(scheme, name):
    case = model_case(name)
    outputs = []
    for order in ("before", "after", "after the first call"):
        model = copy.deepcopy(case.model)
        recording = RecordingBackend(None)
        torch.compiler.reset()
        if order == "before":
            olq_fx.quantize_(model, scheme)
        compiled = torch.compile(model, backend=recording)
        with torch.no_grad():
            if order == "after the first call":
                compiled(*case.args)
            if order != "before":
                olq_fx.quantize_(model, scheme)
            outputs.append(compiled(*case.args))
            assert_same_bits(compiled(*case.args), outputs[-1])
            assert_same_bits(model(*case.args), outputs[-1])
        recording.assert_compilations(2 if order == "after the first call" else 1)
    for again in outputs[1:]:
        assert_same_bits(again, outputs[0])


@every_scheme
def test_30_quantize_the_compiled_module_itself(scheme):
    """`torch.compile(model)` is a module too; its paths are those of the original with a prefix."""
    case = model_case("linear_stack")
    expected = copy.deepcopy(case.model)
    olq_fx.quantize_(expected, scheme)
    compiled = torch.compile(case.model, backend="eager")
    olq_fx.quantize_(compiled, scheme)
    with torch.no_grad():
        assert_same_bits(compiled(*case.args), expected(*case.args))


@every_scheme
def test_32_what_an_adapter_reads(route, scheme):
    dtype = torch.bfloat16
    model = nn.Sequential(nn.Linear(72, 24, dtype=dtype))
    route(model, scheme, torch.randn(2, 72, dtype=dtype))
    base = model[0]
    assert type(base) is nn.Linear
    assert (base.in_features, base.out_features) == (72, 24)
    assert base.weight.dtype == dtype
    assert base.weight.shape == (24, 72)
    assert base.weight.size(1) == 72
    assert base.weight.ndim == base.weight.dim() == 2
    assert base.weight.numel() == 24 * 72
    assert base.weight.device == torch.device("cpu")
    assert base.weight.is_floating_point()
    assert not base.weight.requires_grad
    assert isinstance(base.weight, nn.Parameter)
    like = torch.zeros_like(base.weight)
    assert (like.shape, like.dtype, type(like)) == (base.weight.shape, dtype, torch.Tensor)
    made = base.weight.new_zeros(3)
    assert (made.dtype, type(made)) == (dtype, torch.Tensor)
    assert "24" in repr(base.weight)
    assert "72" in repr(base.weight)
