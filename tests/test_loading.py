"""`olq_fx.load_`: every source gives the bytes of quantizing the loaded model; what has storage keeps it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import olq_fx
from olq_fx.errors import ConfigurationError, ConfigurationTypeError, ConversionError, InterruptedLoadError, LoadError
from olq_fx.testing import assert_same_bits
from olq_fx.weights import QuantizedWeight

SCHEMES = ["fp8_per_tensor", "fp8_per_block", "int8", "mxfp4", "nvfp4_per_token", "mxfp4_dualscale"]


class Block(nn.Module):
    """Linear layers, a tie, a scalar, nothing at all, buffers that are saved and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 64)
        self.up = nn.Linear(64, 160)
        self.norm = nn.BatchNorm1d(160)
        self.down = nn.Linear(160, 64, bias=False)
        self.head = nn.Linear(64, 48, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.down(self.norm(self.up(x)))) * self.scale
        return found


def original(dtype: torch.dtype = torch.float32, seed: int = 0) -> Block:
    torch.manual_seed(seed)
    model = Block()
    with torch.no_grad():
        model.steps.fill_(7 + seed)
        model.scale.fill_(0.25 + seed)
    return model.to(dtype).eval()


def waiting(scheme: str | None, dtype: torch.dtype = torch.float32) -> Block:
    with torch.device("meta"):
        model = Block().to(dtype).eval()
    if scheme is not None:
        olq_fx.quantize_(model, scheme)
    return model


def pending(model: nn.Module) -> list[str]:
    found = [(name, p) for name, p in model.named_parameters() if isinstance(p, QuantizedWeight)]
    return [name for name, weight in found if weight.pending is not None]


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(found[name], tensor)


def saved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict as safetensors takes it: no tensor twice."""
    return {name: tensor.clone().contiguous() for name, tensor in state.items() if name != "head.weight"}


def in_file(folder: Path, state: dict[str, Tensor]) -> Path:
    save_file(saved(state), folder / "some.safetensors")
    return folder / "some.safetensors"


def in_shards(folder: Path, state: dict[str, Tensor]) -> Path:
    items = list(saved(state).items())
    files = {"a.safetensors": dict(items[:5]), "sub/b.safetensors": dict(items[5:])}
    (folder / "sub").mkdir()
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    where = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder / "model.safetensors.index.json"


def in_two_files(folder: Path, state: dict[str, Tensor]) -> Path:
    items = list(saved(state).items())
    save_file(dict(items[:5]), folder / "first.safetensors")
    save_file(dict(items[5:]), folder / "second.safetensors")
    return folder


SOURCES: dict[str, Callable[[Path, dict[str, Tensor]], Any]] = {
    "file": in_file,
    "index": in_shards,
    "directory with an index": lambda folder, state: str(in_shards(folder, state).parent),
    "directory with a file": lambda folder, state: in_file(folder, state).parent,
    "directory without an index": in_two_files,
    "state dict": lambda folder, state: state,
    "iterator": lambda folder, state: iter(state.items()),
    "list of pairs": lambda folder, state: list(reversed(state.items())),
}


@pytest.mark.parametrize("scheme", [*SCHEMES, None])
@pytest.mark.parametrize("kind", list(SOURCES))
def test_every_source_gives_what_quantizing_the_loaded_model_gives(tmp_path, kind, scheme):
    expected = original()
    source = SOURCES[kind](tmp_path, expected.state_dict())
    model = waiting(scheme)
    report = olq_fx.load_(model, source, progress=False)
    if scheme is not None:
        olq_fx.quantize_(expected, scheme)
    assert_equal(model, expected)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model(torch.ones(2, 64)), expected(torch.ones(2, 64)))
    assert report.missing == report.unexpected == ()
    assert set(report.converted) == {n for n, p in model.named_parameters() if isinstance(p, QuantizedWeight)}
    assert model.steps.dtype == torch.int64


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["file", "state dict", "iterator"])
def test_a_converted_model_is_refreshed_where_it_lies(tmp_path, kind, scheme):
    model = original()
    olq_fx.quantize_(model, scheme)
    model.register_buffer("own", torch.tensor([5.0]), persistent=False)
    before = {
        name: [part.data_ptr() for part in getattr(parameter, "parts", (parameter,))]
        for name, parameter in model.named_parameters()
    }
    fresh = original(seed=1)
    olq_fx.load_(model, SOURCES[kind](tmp_path, fresh.state_dict()), progress=False)
    after = {
        name: [part.data_ptr() for part in getattr(parameter, "parts", (parameter,))]
        for name, parameter in model.named_parameters()
    }
    olq_fx.quantize_(fresh, scheme)
    assert after == before
    assert_equal(model, fresh)
    assert torch.equal(model.own, torch.tensor([5.0]))


def test_a_refresh_needs_no_new_compilation():
    model = original()
    olq_fx.quantize_(model, "int8")
    count = CompileCounter()
    compiled = torch.compile(model, backend=count)
    with torch.no_grad():
        compiled(torch.ones(2, 64))
        fresh = original(seed=1)
        olq_fx.load_(compiled, fresh.state_dict(), progress=False)
        olq_fx.quantize_(fresh, "int8")
        torch.testing.assert_close(compiled(torch.ones(2, 64)), fresh(torch.ones(2, 64)))
    assert count.frame_count == 1


def test_a_shard_at_a_time(tmp_path):
    in_two_files(tmp_path, original().state_dict())
    model = waiting("int8")
    first = olq_fx.load_(model, tmp_path / "first.safetensors", strict=False, progress=False)
    assert "down.weight" in first.missing
    assert pending(model) == ["down.weight"]
    second = olq_fx.load_(model, tmp_path / "second.safetensors", strict=False, progress=False)
    assert "down.weight" in second.converted
    expected = original()
    olq_fx.quantize_(expected, "int8")
    assert_equal(model, expected)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_floating_tensors_keep_their_dtype_or_get_the_one_asked_for(own, dtype):
    model = waiting("int8", own)
    olq_fx.load_(model, original(torch.bfloat16).state_dict(), dtype=dtype, progress=False)
    wanted = own if dtype is None else dtype
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {name: t.dtype for name, t in tensors.items() if t.is_floating_point()} == {
        name: wanted for name, t in tensors.items() if t.is_floating_point()
    }
    assert model.steps.dtype == torch.int64


def test_weights_are_converted_from_the_dtype_that_comes():
    model = waiting("int8", torch.bfloat16)
    olq_fx.load_(model, original().state_dict(), progress=False)
    expected = original()
    olq_fx.quantize_(expected, "int8")
    for own, other in zip(model.up.weight.parts, expected.up.weight.parts, strict=True):
        assert_same_bits(own, other)


def test_parameters_keep_what_others_have_said_of_them():
    model = waiting("int8")
    model.up.bias.requires_grad_(False)
    model.up.bias.group = "slow"
    olq_fx.load_(model, original().state_dict(), progress=False)
    assert not model.up.bias.requires_grad
    assert model.up.bias.group == "slow"
    assert model.scale.requires_grad


def test_the_state_dict_is_not_shared_with_the_model():
    values = original().state_dict()
    model = waiting(None)
    olq_fx.load_(model, values, progress=False)
    model.up.bias.data.zero_()
    assert values["up.bias"].any()


def test_offloaded_weights_go_to_the_cpu():
    model = waiting("int8")
    olq_fx.load_(model, original().state_dict(), device="cpu", offload="cpu", progress=False)
    assert {part.device.type for part in model.up.weight.parts} == {"cpu"}


def test_one_that_the_names_tie_twice_must_have_the_same_values():
    state = original().state_dict()
    olq_fx.load_(waiting("int8"), {**state, "head.weight": state["head.weight"].clone()}, progress=False)
    with pytest.raises(LoadError, match=r"'head.weight'.*'embedding.weight' has other values.*ties"):
        olq_fx.load_(waiting("int8"), {**state, "head.weight": state["head.weight"] + 1}, progress=False)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("angles", torch.arange(8.0), persistent=False)


def test_a_buffer_that_no_file_brings_is_an_error_by_name():
    with torch.device("meta"):
        model = Rotary()
    olq_fx.quantize_(model, "int8")
    state = {"linear.weight": torch.randn(32, 32), "linear.bias": torch.zeros(32)}
    with pytest.raises(LoadError, match=r"'angles' is on meta.*build it with values"):
        olq_fx.load_(model, state, progress=False)
    assert pending(model) == ["linear.weight"]
    assert olq_fx.load_(model, state, strict=False, progress=False).missing == ("angles",)
    model.angles = torch.arange(8.0)
    olq_fx.load_(model, state, progress=False)
    assert pending(model) == []


@pytest.mark.parametrize("error", [RuntimeError, OSError, KeyboardInterrupt])
def test_an_interruption_leaves_pending_weights_and_names_them(error):
    state = original().state_dict()

    def broken() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in state.items():
            if name == "down.weight":
                raise error("the line is dead")
            yield name, tensor

    model = waiting("fp8_per_block")
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else InterruptedLoadError) as caught:
        olq_fx.load_(model, broken(), progress=False)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "the line is dead" in text
    assert "'down.weight'" in text
    assert "'up.weight'" not in text
    assert pending(model) == ["down.weight"]
    olq_fx.load_(model, state, progress=False)
    expected = original()
    olq_fx.quantize_(expected, "fp8_per_block")
    assert_equal(model, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["file", "state dict", "iterator"])
def test_values_that_are_not_finite_are_an_error_by_name(tmp_path, kind, bad):
    state = {name: tensor.clone() for name, tensor in original().state_dict().items()}
    state["down.weight"][3, 5] = bad
    model = waiting("int8")
    with pytest.raises(ConversionError, match=r"'down.weight'.*1 of 10240 are NaN or Inf.*without values are.*'down"):
        olq_fx.load_(model, SOURCES[kind](tmp_path, state), progress=False)
    assert "down.weight" in pending(model)
    olq_fx.load_(model, original().state_dict(), progress=False)
    assert pending(model) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "meta"}, ConfigurationError, "device: what is put on 'meta' loses its data"),
        ({"device": "nonsense"}, ConfigurationError, "device: nothing can be put on 'nonsense'"),
        ({"offload": "meta"}, ConfigurationError, "offload: "),
        ({"dtype": torch.int8}, ConfigurationError, "dtype: torch.int8 is none of"),
        ({"source": 3}, ConfigurationTypeError, "a int cannot be loaded"),
        ({"source": nn.Linear(2, 2)}, ConfigurationTypeError, r"its state_dict\(\) can"),
        ({"source": b"x"}, ConfigurationTypeError, "a bytes cannot be loaded"),
        ({"model": {}}, ConfigurationTypeError, "a model is a torch.nn.Module, not dict"),
    ],
)
def test_arguments_without_a_meaning(arguments, error, message):
    given = {"model": waiting("int8"), "source": original().state_dict(), "progress": False, **arguments}
    with pytest.raises(error, match=message):
        olq_fx.load_(**given)


def test_the_report_says_what_was_done():
    text = str(olq_fx.load_(waiting("int8"), original().state_dict(), progress=False))
    assert "MiB read in" in text
    assert "2 weights converted" in text
