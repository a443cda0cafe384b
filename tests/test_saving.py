"""Saving a converted model and restoring it: the same bytes, as a whole or not at all."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import olq_fx
from olq_fx import restoring, tensor_files, whole_directories
from olq_fx.errors import ConfigurationError, PendingWeightError, SavedModelError, SaveError
from olq_fx.manifest import MANIFEST, SavedFile, _digest, read_manifest
from olq_fx.quantize import quantize_
from olq_fx.restoring import restore_
from olq_fx.saving import save
from olq_fx.schemes import SCHEMES
from olq_fx.testing import Conv1D, assert_same_bits
from olq_fx.weights import QuantizedWeight

EXPERTS = Path(__file__).parent / "data" / "tiny-qwen3moe-wiki"


class Experts(nn.Module):
    """Experts in one tensor, gate and up merged."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 128, 96))
        self.down_proj = nn.Parameter(torch.randn(3, 96, 64))


class Model(nn.Module):
    """Layers of every kind, a tie of plain tensors and one of converted ones, buffers that are saved and not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(96, 96)
        self.again = nn.Linear(96, 96)
        self.again.weight = self.first.weight
        self.conv = Conv1D(40, 96)
        self.norm = nn.LayerNorm(96)
        self.other_norm = nn.LayerNorm(96)
        self.other_norm.weight = self.norm.weight
        self.experts = Experts()
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("not_saved", torch.arange(2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv(self.norm(self.again(self.first(x))))
        return found


def original(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().eval()


def quantized(scheme: str, seed: int = 0) -> Model:
    model = original(seed)
    quantize_(model, scheme)
    return model


def on_meta(scheme: str | None = None) -> Model:
    with torch.device("meta"):
        model = Model().eval()
    model.again.weight = model.first.weight
    model.other_norm.weight = model.norm.weight
    if scheme is not None:
        quantize_(model, scheme)
    return model


def assert_same_model(one: nn.Module, other: nn.Module) -> None:
    a, b = one.state_dict(), other.state_dict()
    assert list(a) == list(b)
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key].view(torch.uint8).cpu(), b[key].view(torch.uint8).cpu()), key
    for path, parameter in one.named_parameters():
        if isinstance(parameter, QuantizedWeight):
            there: Any = other.get_parameter(path)
            assert there.spec == parameter.spec
            assert (there.shape, there.stride(), there.dtype) == (parameter.shape, parameter.stride(), parameter.dtype)


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_a_saved_model_is_restored_bit_by_bit(scheme: str, tmp_path: Path):
    model = quantized(scheme)
    saved = save(model, tmp_path / "out", config=scheme)
    assert saved.weights == 4
    for fresh in (on_meta(), on_meta(scheme), original(1), quantized(scheme, 1)):
        restored = restore_(fresh, tmp_path / "out", verify="all")
        assert_same_model(model, fresh)
        assert fresh.again.weight is fresh.first.weight
        assert fresh.other_norm.weight is fresh.norm.weight
        assert fresh.not_saved.tolist() == [0, 1]
        assert restored.buffers_without_data == ()
        x = torch.randn(4, 96)
        with torch.no_grad():
            assert_same_bits(fresh(x), model(x))


@pytest.mark.parametrize("scheme", ["fp8_per_channel", "nvfp4_per_token"])
def test_the_files_are_plain_and_load_without_us(scheme: str, tmp_path: Path):
    model = quantized(scheme)
    save(model, tmp_path / "out")
    state = load_file(tmp_path / "out" / "model.safetensors")
    expected = model.state_dict()
    assert set(expected) - set(state) == {
        *(key for key in expected if key.startswith("again.weight")),
        "other_norm.weight",
    }
    fresh = quantized(scheme, 1)
    ties = {key: key.replace("again", "first").replace("other_norm", "norm") for key in set(expected) - set(state)}
    fresh.load_state_dict(state | {key: state[name] for key, name in ties.items()})
    assert_same_model(model, fresh)


def test_shards_have_an_index_and_tensors_of_a_weight_stay_together(tmp_path: Path):
    model = quantized("nvfp4_per_token")
    saved = save(model, tmp_path / "out", max_shard_size="8KB")
    files = sorted(path.name for path in (tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    where = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    for weight in read_manifest(tmp_path / "out").weights:
        assert len({where[part] for part in weight.parts}) == 1
    assert set(saved.files) == {path.name for path in (tmp_path / "out").iterdir()}
    fresh = on_meta()
    restore_(fresh, tmp_path / "out")
    assert_same_model(model, fresh)


def test_refreshing_keeps_the_storage(tmp_path: Path):
    save(quantized("int8"), tmp_path / "out")
    model = quantized("int8", 1)
    before = [part.data_ptr() for p in model.parameters() if isinstance(p, QuantizedWeight) for part in p.parts]
    restore_(model, tmp_path / "out")
    after = [part.data_ptr() for p in model.parameters() if isinstance(p, QuantizedWeight) for part in p.parts]
    assert before == after


def test_writing_to_a_restored_model_does_not_write_to_the_files(tmp_path: Path):
    save(quantized("int8"), tmp_path / "out")
    model = on_meta()
    restore_(model, tmp_path / "out")
    with torch.no_grad():
        model.first.weight.copy_(torch.randn(96, 96))
        model.norm.weight.fill_(3)
    restore_(on_meta(), tmp_path / "out", verify="all")


# What does not fit, and what is damaged


def spoil_version(path: Path) -> None:
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(content | {"format_version": 99}))


def spoil_writer(path: Path) -> None:
    (path / MANIFEST).write_text(json.dumps({"anything": 1}))


def spoil_content(path: Path) -> None:
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace("int8_per_token", "fp8_per_token"))


def cut_manifest(path: Path) -> None:
    (path / MANIFEST).write_text((path / MANIFEST).read_text()[:100])


def cut_file(path: Path) -> None:
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)


def remove_file(path: Path) -> None:
    (path / "model.safetensors").unlink()


def replace_file(path: Path) -> None:
    state = load_file(path / "model.safetensors")
    save_file({key: torch.zeros_like(value) for key, value in state.items()}, path / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_version, "format version 99"),
        (spoil_writer, "is foreign"),
        (spoil_content, "was changed after it was written"),
        (cut_manifest, "no JSON"),
        (cut_file, "bytes, .* were written"),
        (remove_file, "is not there"),
        (replace_file, "model.safetensors (is stale|has)"),
    ],
)
def test_what_is_damaged_is_refused_with_the_reason(spoil: Any, message: str, tmp_path: Path):
    save(quantized("int8"), tmp_path / "out")
    spoil(tmp_path / "out")
    model = on_meta()
    with pytest.raises(SavedModelError, match=message):
        restore_(model, tmp_path / "out")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_one_changed_byte_is_found_by_verifying_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(quantized("int8"), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    # As if the byte lay between the blocks of a large file.
    monkeypatch.setattr(restoring, "check_files", lambda directory, manifest: None)
    with pytest.raises(SavedModelError, match="is damaged"):
        restore_(on_meta(), tmp_path / "out", verify="all")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a\\b", "c:d", ".."])
def test_a_file_elsewhere_is_not_opened(name: str, tmp_path: Path):
    save(quantized("int8"), tmp_path / "out")
    content = json.loads((tmp_path / "out" / MANIFEST).read_text())
    content["files"][0]["name"] = name
    del content["digest"]
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(content | {"digest": _digest(content)}))
    with pytest.raises(SavedModelError, match="not opened"):
        restore_(on_meta(), tmp_path / "out")


def test_a_model_planned_otherwise_is_refused_with_both_formats(tmp_path: Path):
    save(quantized("int8"), tmp_path / "out")
    model = on_meta("fp8_per_block")
    with pytest.raises(
        SavedModelError, match=r"'first\.weight' is saved in int8_per_channel_static.*fp8_per_block_static"
    ):
        restore_(model, tmp_path / "out")
    assert model.first.weight.pending is not None  # type: ignore[union-attr]


def test_another_shape_and_other_names_are_refused(tmp_path: Path):
    save(quantized("int8"), tmp_path / "out")
    model = on_meta()
    model.conv = Conv1D(48, 96)
    model.more = nn.Linear(2, 2)
    with pytest.raises(SavedModelError, match="shape") as caught:
        restore_(model, tmp_path / "out")
    assert "'more.weight' is not in the directory" in str(caught.value)


def test_a_pending_model_is_not_saved(tmp_path: Path):
    with pytest.raises(PendingWeightError, match=r"first\.weight"):
        save(on_meta("int8"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["5 apples", 0, "-1"])
def test_a_size_without_meaning_is_refused(size: object, tmp_path: Path):
    with pytest.raises(ConfigurationError, match="max_shard_size"):
        save(quantized("int8"), tmp_path / "out", max_shard_size=size)  # type: ignore[arg-type]


def test_a_name_in_two_files_is_refused_with_both(tmp_path: Path):
    out = tmp_path / "out"
    save(quantized("int8"), out)
    shutil.copy(out / "model.safetensors", out / "more.safetensors")
    content = json.loads((out / MANIFEST).read_text())
    content["files"].append(dataclasses.asdict(SavedFile.of(out / "more.safetensors")))
    del content["digest"]
    (out / MANIFEST).write_text(json.dumps(content | {"digest": _digest(content)}))
    model = on_meta()
    with pytest.raises(SavedModelError, match=r"is in two files of .*: model\.safetensors and more\.safetensors"):
        restore_(model, out)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_with_experts_in_one_tensor_gives_the_same_logits(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(EXPERTS, dtype=torch.float32).eval()
    quantize_(model, "int8")
    assert any(isinstance(p, QuantizedWeight) and p.dim() == 3 for p in model.parameters())
    save(model, tmp_path / "out")
    with torch.device("meta"):
        fresh = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    olq_fx.load_(fresh, tmp_path / "out")
    assert_same_model(model, fresh)
    ids = torch.arange(5, 37)[None]
    with torch.no_grad():
        assert_same_bits(fresh(ids).logits, model(ids).logits)


# The old or the new, and nothing else


def test_what_is_no_saved_model_is_not_replaced(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("words")
    with pytest.raises(SaveError, match="is not replaced"):
        save(quantized("int8"), tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "words"


@pytest.mark.parametrize("at_once", [True, False])
def test_replacing_keeps_what_others_have_put_there(at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if not at_once:
        monkeypatch.setattr(whole_directories, "_exchange", lambda one, other: False)
    save(quantized("int8"), tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    new = quantized("mxfp4", 1)
    save(new, tmp_path / "out")
    fresh = on_meta()
    restore_(fresh, tmp_path / "out", verify="all")
    assert_same_model(new, fresh)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk_changes_nothing(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old = quantized("int8")
    if there:
        save(old, tmp_path / "out")
    count = 0

    def write(file: Any, content: bytes) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise OSError(28, "No space left on device")
        file.write(content)

    monkeypatch.setattr(tensor_files, "_write", write)
    with pytest.raises(SaveError, match="No space left on device"):
        save(quantized("mxfp4"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if there else [])
    if there:
        fresh = on_meta()
        restore_(fresh, tmp_path / "out", verify="all")
        assert_same_model(old, fresh)


KILLED = """
import sys, torch
from torch import nn
import olq_fx
from olq_fx.saving import save
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
olq_fx.quantize_(model, "int8")
save(model, sys.argv[1], max_shard_size="70KB")
print("ready", flush=True)
while True:
    save(model, sys.argv[1], max_shard_size="70KB")
"""


def kill_while_saving(directory: Path, seconds: float) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(directory)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_any_point_a_whole_model_is_there(times: int, tmp_path: Path):
    directory = tmp_path / "out"
    for attempt in range(times):
        kill_while_saving(directory, 0.02 + 0.013 * attempt)
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
        restore_(model, directory, verify="all")
    small = nn.Sequential(nn.Linear(256, 256))
    quantize_(small, "int8")
    save(small, directory)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # what the killed ones have left is gone
