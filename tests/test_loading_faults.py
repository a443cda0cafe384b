"""Files that are damaged, foreign or hostile, and names that do not fit: an error that says which, and nothing done."""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import olq_fx
from olq_fx.errors import InterruptedLoadError, LoadError
from olq_fx.loading_slots import Filling, obstacle, slots_of
from olq_fx.loading_stored import DTYPES, stored_in
from olq_fx.testing import assert_same_bits
from olq_fx.weights import QuantizedWeight, missing


def waiting() -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32, bias=False))
    olq_fx.quantize_(model, "fp8_per_block")
    return model


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (96, 64), "0.bias": (96,), "1.weight": (32, 96)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def refused(source: Any, message: str, **options: Any) -> None:
    """`load_` refuses a source, and the model is as it was."""
    model = waiting()
    with pytest.raises(LoadError, match=message) as caught:
        olq_fx.load_(model, source, progress=False, **options)
    assert not isinstance(caught.value, InterruptedLoadError)
    for parameter in model.parameters():
        assert parameter.is_meta
        assert not isinstance(parameter, QuantizedWeight) or missing(parameter) == parameter.numel()


def written(folder: Path, **tensors: Tensor) -> Path:
    path = folder / "model.safetensors"
    save_file({**state(), **tensors}, path)
    return path


def by_hand(path: Path, header: Any, content: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)
    return path


@pytest.mark.parametrize("left", [0, 5, 8, 60, -1])
def test_a_file_that_is_cut_off(tmp_path, left):
    path = written(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    last = max(json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")]).items(), key=_end)[0]
    refused(path, f"{path} is cut off: '{last}' ends at byte" if left == -1 else str(path))


def _end(item: tuple[str, Any]) -> int:
    return 0 if item[0] == "__metadata__" else int(item[1]["data_offsets"][1])


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "content", "message"),
    [
        ({"a": entry()}, b"12345678x", "behind its last tensor are 1 bytes"),
        ({"a": entry(shape=(3,))}, b"12345678", "'a', F32 .3,., has 8 bytes instead of 12"),
        ({"a": entry("F9")}, b"12345678", "'a' of .* has the dtype 'F9'; valid: F64"),
        ({"a": entry(shape=(-2,))}, b"12345678", "says of 'a'"),
        ({"a": entry(shape=(2.0,))}, b"12345678", "says of 'a'"),
        ({"a": {"dtype": "F32"}}, b"", "says of 'a'"),
        ({"a": 3}, b"", "says of 'a' 3"),
        ({"a": entry(offsets=(8, 0))}, b"12345678", "says of 'a'|bytes instead"),
        ({"a": entry(), "b": entry()}, b"12345678", "'b' begins at byte .* instead of|'a' begins"),
        ({"a": entry(), "b": entry(offsets=(16, 24))}, b"1" * 24, "'b' begins at byte"),
        ([1], b"", "not an object"),
        (b"{", b"", "its header is no JSON"),
        (b"[" * 100_000, b"", "its header is no JSON"),
        (b'{"a": {"dtype": "F32"}, "a": {}}', b"", "its header has 'a' twice"),
        (b"\xff\xfe", b"", "its header is no JSON"),
    ],
)
def test_a_header_that_is_not_true(tmp_path, header, content, message):
    refused(by_hand(tmp_path / "x.safetensors", header, content), message)


def test_a_file_that_shrinks_while_it_is_loaded(tmp_path):
    path = written(tmp_path)
    tensors = stored_in(path)
    with path.open("r+b") as file:
        file.truncate(200)
    for tensor in tensors:
        with pytest.raises(LoadError, match=f"'{tensor.name}' of .* was cut off while it was being loaded"):
            tensor.read()


class Trap:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.safetensors", "model.ckpt"])
@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_pickled_files_are_never_opened(tmp_path, name, write):
    with (tmp_path / name).open("wb") as file:
        write(Trap(), file)
    refused(tmp_path / name, "is a pickled file, which can run any code.*weights_only=True")
    refused(tmp_path, "is a pickled file, which can run any code")


def test_a_gguf_file_is_called_one(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    refused(tmp_path / "x.gguf", "is a GGUF file")


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a/../../x", "C:\\x", "..\\x.safetensors", "\\\\host\\x", "a\0b"]
)
def test_an_index_that_leads_outside(tmp_path, file):
    folder = tmp_path / "inner"
    folder.mkdir()
    save_file(state(), tmp_path / "x.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state(), file)}))
    refused(index, "outside of its directory: not opened")


def test_files_of_an_index_may_be_links(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(state(), tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "a.safetensors").symlink_to(tmp_path / "blobs" / "0123")
    index = tmp_path / "snapshot" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state(), "a.safetensors")}))
    model = waiting()
    olq_fx.load_(model, tmp_path / "snapshot", progress=False)
    olq_fx.finalize(model)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "is no index of safetensors files: KeyError"),
        ([], "is no index of safetensors files"),
        ({"weight_map": 3}, "its weight_map is 3"),
        ({"weight_map": {"a": 3}}, "says that 'a' is in 3, which is no file"),
        ({"weight_map": {"a": "model.bin"}}, "is a pickled file"),
        ({"weight_map": {"a": "gone.safetensors"}}, "names gone.safetensors, which is not there; 1 tensors.*'a'"),
        ({"weight_map": {"a": "model.safetensors"}}, "says that 'a' is in model.safetensors, and it is not"),
    ],
)
def test_an_index_that_is_not_true(tmp_path, index, message):
    written(tmp_path)
    path = tmp_path / "other.safetensors.index.json"
    path.write_text(json.dumps(index))
    refused(path, message)


def test_a_name_in_two_files(tmp_path):
    save_file(state(), tmp_path / "a.safetensors")
    save_file({"0.bias": state()["0.bias"]}, tmp_path / "b.safetensors")
    refused(tmp_path, r"'0.bias' is in two files, .*a.safetensors and .*b.safetensors")


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in state().items() if key != name}


FITS: dict[str, tuple[Callable[[], dict[str, Tensor]], str]] = {
    "missing": (lambda: without("1.weight"), r"missing are '1.weight'. Nothing was loaded"),
    "unexpected": (
        lambda: {**without("1.weight"), "1.weigth": torch.ones(32, 96)},
        r"no place for '1.weigth'.*did you mean '1.weight'\?\).*missing are '1.weight'",
    ),
    "shape": (
        lambda: {**state(), "1.weight": torch.ones(96, 32)},
        r"'1.weight'.*: its shape is \(96, 32\), that of '1.weight' \(32, 96\)",
    ),
    "integers": (
        lambda: {**state(), "1.weight": torch.ones(32, 96, dtype=torch.int8)},
        "its dtype is int8, and '1.weight' is quantized from float32.*quantized already",
    ),
    "float8": (
        lambda: {**state(), "1.weight": torch.ones(32, 96).to(torch.float8_e4m3fn)},
        "its dtype is float8_e4m3fn.*quantized already",
    ),
    "bias": (
        lambda: {**state(), "0.bias": torch.ones(96, dtype=torch.int64)},
        "'0.bias'.*its dtype is int64, that of '0.bias' float32",
    ),
}


@pytest.mark.parametrize("case", list(FITS))
@pytest.mark.parametrize("in_memory", [False, True], ids=["file", "state dict"])
def test_names_shapes_and_dtypes_are_checked_before_anything_is_done(tmp_path, case, in_memory):
    make, message = FITS[case]
    save_file(make(), tmp_path / "model.safetensors")
    refused(make() if in_memory else tmp_path, message)


def test_several_faults_are_told_at_once():
    refused(
        {"0.weight": torch.ones(2, 2), "x": torch.ones(1)},
        r"\(2, 2\).*no place for 'x'.*missing are '0.bias', '1.weight'. N",
    )


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("0.bias", torch.zeros(96)), ("0.bias", torch.zeros(96))], "'0.bias' is there twice"),
        ([("nobody", torch.zeros(96))], "no place for 'nobody'"),
        ([("0.bias", torch.zeros(95))], r"\(95,\), that of '0.bias' \(96,\)"),
        ([("0.bias", torch.zeros(96))], "missing are '0.weight', '1.weight'"),
        ([("0.bias", 3)], "'0.bias' is given .*int.*a name and a tensor are needed"),
        ([3], "gives .*int.*a name and a tensor are needed"),
        ([("0.bias", torch.zeros(96, device="meta"))], "'0.bias' is on meta"),
    ],
)
def test_an_iterator_is_checked_as_it_comes(pairs, message):
    model = waiting()
    with pytest.raises(LoadError, match=f"{message}.*loading stopped after . tensors.*without values are.*'1.weight'"):
        olq_fx.load_(model, iter(pairs), progress=False)
    olq_fx.load_(model, state(), progress=False)
    olq_fx.finalize(model)


@pytest.mark.parametrize("value", [3, None, torch.zeros(96, device="meta")])
def test_a_state_dict_of_something_else(value):
    refused({**state(), "0.bias": value}, "'0.bias'")


def test_what_is_not_there(tmp_path):
    written(tmp_path)
    refused(tmp_path / "model.safetensor", "there is no .*did you mean 'model.safetensors'")
    refused("somebody-s-models/some-model", "snapshot_download")
    (tmp_path / "below").mkdir()
    written(tmp_path / "below")
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "has no safetensors files; below have some")


def test_without_strict_the_report_lists_what_does_not_fit():
    model = waiting()
    report = olq_fx.load_(model, {**without("1.weight"), "x": torch.ones(1)}, strict=False, progress=False)
    assert (report.missing, report.unexpected) == (("1.weight",), ("x",))
    assert report.converted == ("0.weight",)
    assert "without values: 1.weight" in str(report)


def test_what_has_storage_elsewhere_is_not_moved():
    """Here is one device only, so the question is asked of the check itself."""
    model = nn.Linear(4, 4)
    elsewhere = Filling(device=torch.device("cuda", 0))
    reasons = {slot.name: obstacle(slot, elsewhere, moved=True) for slot in slots_of(model).values()}
    wanted = "it has storage on cpu, not on cuda:0: move the model first, or leave device out"
    assert reasons == {"weight": wanted, "bias": wanted}
    offloading = Filling(device=torch.device("cuda", 0), offload=torch.device("cpu"))
    assert not any(obstacle(slot, offloading, moved=True) for slot in slots_of(model).values())
    assert not any(obstacle(slot, elsewhere, moved=False) for slot in slots_of(model).values())
    assert not any(obstacle(slot, elsewhere, moved=True) for slot in slots_of(waiting()).values())


def test_a_lazy_parameter_has_no_place_yet():
    with pytest.raises(LoadError, match="'weight' has no shape yet"):
        olq_fx.load_(nn.LazyLinear(3), state(), progress=False)


def test_files_are_read_as_safetensors_reads_them(tmp_path):
    path = tmp_path / "all.safetensors"
    tensors = {}
    for name, dtype in DTYPES.items():
        values = torch.arange(24, dtype=torch.uint8)
        tensors[name] = (values % 2).bool() if dtype == torch.bool else values.view(dtype)
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3), "matrix": torch.randn(3, 5)}
    save_file(tensors, path)
    with safe_open(path, framework="pt") as file:
        for tensor in stored_in(path):
            other = file.get_tensor(tensor.name)
            tensor.touch()
            assert (tensor.shape, tensor.dtype) == (tuple(other.shape), other.dtype)
            assert_same_bits(tensor.read(), other)
            tensor.release()
            assert_same_bits(tensor.read(), other)
    assert len(stored_in(path)) == len(tensors)
