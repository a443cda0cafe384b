"""`olq-fx quantize`: the bytes are those of a whole conversion, and what is finished is not done twice."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import olq_fx
from olq_fx import loading_slots, saving
from olq_fx.manifest import MANIFEST
from olq_fx.optional_packages import load_transformers
from olq_fx.saving import save
from olq_fx.whole_directories import locked

DATA = Path(__file__).parent / "data"
DENSE, EXPERTS = DATA / "tiny-qwen3-wiki", DATA / "tiny-qwen3moe-wiki"
SMALL = ("--max-shard-size", "1MB")


def loaded(folder: Path) -> torch.nn.Module:
    return load_transformers().AutoModelForCausalLM.from_pretrained(folder).eval()


def on_meta(folder: Path) -> torch.nn.Module:
    library = load_transformers()
    config = library.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return library.AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def unfinished(tmp_path: Path) -> Path:
    return tmp_path / ".out.unfinished"


@pytest.mark.parametrize(
    ("folder", "scheme", "size"),
    [(DENSE, "fp8_per_block", "1MB"), (EXPERTS, "mxfp4", "2MB")],
    ids=["dense", "experts"],
)
def test_bytes_are_those_of_a_whole_conversion(olq, tmp_path, folder, scheme, size):
    ended = olq("quantize", str(folder), "out", "-q", scheme, "--max-shard-size", size, "--json")
    assert (ended.code, ended.err) == (0, "")
    data = ended.data
    whole = loaded(folder)
    olq_fx.quantize_(whole, scheme)
    expected = save(whole, tmp_path / "whole", max_shard_size=size, config=scheme, source=str(folder))
    assert data["shards"] > 2
    assert (data["weights"], data["bytes"]) == (expected.weights, expected.nbytes)
    assert tuple(data["files"]) == expected.files
    assert data["resumed_shards"] == 0
    made = contents(tmp_path / "out")
    assert made == contents(tmp_path / "whole") | {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.name.startswith(("tokenizer", "generation_config"))
    }
    assert not unfinished(tmp_path).exists()
    other = on_meta(folder)
    olq_fx.load_(other, tmp_path / "out")
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(whole(ids).logits, other(ids).logits)


def test_tied_embeddings_are_written_once(olq, tmp_path):
    """On meta nothing but the parameter itself tells that two names are one."""
    shutil.copytree(DENSE, tmp_path / "tied")
    config = json.loads((DENSE / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "tied/config.json").write_text(json.dumps(config))
    tensors = load_file(DENSE / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "tied/model.safetensors", {"format": "pt"})
    assert olq("quantize", "tied", "out", "-q", "int8", *SMALL).code == 0
    whole = loaded(tmp_path / "tied")
    olq_fx.quantize_(whole, "int8")
    save(whole, tmp_path / "whole", max_shard_size="1MB", config="int8", source="tied")
    made = contents(tmp_path / "out")
    assert {name: made[name] for name in contents(tmp_path / "whole")} == contents(tmp_path / "whole")
    assert json.loads(made[MANIFEST])["ties"] == {"lm_head.weight": "model.embed_tokens.weight"}


@dataclasses.dataclass
class Counted:
    """The places that were given values, the files that were written, and after how many of them writing fails."""

    names: list[str] = dataclasses.field(default_factory=list)
    files: list[str] = dataclasses.field(default_factory=list)
    fails_after: int = 10**6


@pytest.fixture
def counted(monkeypatch):
    found = Counted()
    put, write = loading_slots.Filling.put, saving.Writing.write

    def counting_put(self, slot, place, values):
        found.names.append(slot.name)
        return put(self, slot, place, values)

    def counting_write(self, shard, values):
        if len(found.files) >= found.fails_after:
            raise KeyboardInterrupt
        found.files.append(shard.name)
        return write(self, shard, values)

    monkeypatch.setattr(loading_slots.Filling, "put", counting_put)
    monkeypatch.setattr(saving.Writing, "write", counting_write)
    return found


def test_memory_holds_the_weights_of_one_file(olq, tmp_path, monkeypatch):
    """When a file is written, everything that is not in it is on meta."""
    write, seen = saving.Writing.write, []

    def looking(self, shard, values):
        there = {name for name, tensor in self._model.state_dict().items() if not tensor.is_meta}
        seen.append(there == {entry.name for entry in shard.entries})
        return write(self, shard, values)

    monkeypatch.setattr(saving.Writing, "write", looking)
    assert olq("quantize", str(DENSE), "out", "-q", "int8", *SMALL).code == 0
    assert len(seen) > 2
    assert all(seen)


def interrupted(olq, counted, after: int = 2, scheme: str = "int8") -> None:
    counted.fails_after = after
    ended = olq("quantize", str(DENSE), "out", "-q", scheme, *SMALL)
    assert ended.code == 130
    assert len(counted.files) == after
    assert not Path("out").exists()
    counted.fails_after = 10**6


def test_an_interrupted_run_goes_on(olq, tmp_path, counted):
    assert olq("quantize", str(DENSE), "whole", "-q", "int8", *SMALL).code == 0
    count = len(counted.names)
    counted.files.clear()
    counted.names.clear()
    interrupted(olq, counted)
    finished = set(counted.names)
    first = list(counted.files)
    counted.names.clear()
    counted.files.clear()
    data = olq("quantize", str(DENSE), "out", "-q", "int8", *SMALL, "--json").data
    assert data["resumed_shards"] == 2
    assert not set(first) & set(counted.files)
    assert len(first) + len(counted.files) == data["shards"]
    assert 0 < len(counted.names) < count
    written = set(json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"].values())
    assert written == {*first, *counted.files}
    assert finished - set(counted.names), "what is in finished files was not read again"
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not unfinished(tmp_path).exists()


def test_a_damaged_file_of_an_interrupted_run_is_written_again(olq, tmp_path, counted):
    interrupted(olq, counted)
    path = unfinished(tmp_path) / counted.files[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    counted.files.clear()
    data = olq("quantize", str(DENSE), "out", "-q", "int8", *SMALL, "--json").data
    assert data["resumed_shards"] == 1
    assert path.name in counted.files
    assert olq("quantize", str(DENSE), "whole", "-q", "int8", *SMALL).code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_run_that_finished_nothing_is_no_other_run(olq, tmp_path, counted):
    interrupted(olq, counted, after=0)
    ended = olq("quantize", str(DENSE), "out", "-q", "int8", *SMALL)
    assert (ended.code, ended.err) == (0, "")


def test_what_another_configuration_has_left_is_removed(olq, tmp_path, counted):
    interrupted(olq, counted)
    (unfinished(tmp_path) / "stray").mkdir()
    ended = olq("quantize", str(DENSE), "out", "-q", "mxfp8", *SMALL)
    assert ended.code == 0
    assert "another model or configuration" in ended.err
    assert not (tmp_path / "out/stray").exists()
    assert olq("quantize", str(DENSE), "whole", "-q", "mxfp8", *SMALL).code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_saved_model_is_replaced_and_keeps_what_others_put_there(olq, tmp_path, counted):
    assert olq("quantize", str(DENSE), "out", "-q", "mxfp8").code == 0
    (tmp_path / "out/notes.md").write_text("mine")
    before = contents(tmp_path / "out")
    counted.files.clear()
    counted.fails_after = 1
    assert olq("quantize", str(DENSE), "out", "-q", "int8", *SMALL).code == 130
    assert contents(tmp_path / "out") == before
    counted.fails_after = 10**6
    assert olq("quantize", str(DENSE), "out", "-q", "int8", *SMALL).code == 0
    assert (tmp_path / "out/notes.md").read_text() == "mine"
    assert not (tmp_path / "out/model.safetensors").exists()


def test_two_processes_do_not_write_one_result(olq, tmp_path):
    unfinished(tmp_path).mkdir()
    with locked(unfinished(tmp_path)) as free:
        assert free
        ended = olq("quantize", str(DENSE), "out", "-q", "int8")
    assert ended.code == 4
    assert "another process" in ended.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("no/such", "out", "-q", "int8"), 2, "no folder here"),
        (("cases:stack", "out", "-q", "int8"), 2, "needs a folder"),
        ((str(DENSE), "taken", "-q", "int8"), 2, "no saved model: it is not replaced"),
        ((str(DENSE), "taken/file", "-q", "int8"), 2, "is a file"),
        ((str(DENSE), "out", "-q", "int9"), 2, "did you mean 'int8'"),
        ((str(DENSE), "out"), 2, "--quantization NAME"),
        ((str(DENSE), "out", "-q", "int8", "--max-shard-size", "big"), 2, "write it as 5GB"),
        (("bare", "out", "-q", "int8"), 4, "no safetensors files"),
        (("cut", "out", "-q", "int8"), 4, "model.safetensors"),
        ((str(DENSE),), 2, "OUT"),
    ],
)
def test_clear_errors(olq, tmp_path, arguments, code, said):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("precious")
    for name in ("bare", "cut"):
        (tmp_path / name).mkdir()
        shutil.copy(DENSE / "config.json", tmp_path / name)
    (tmp_path / "cut/model.safetensors").write_bytes((DENSE / "model.safetensors").read_bytes()[:-100])
    ended = olq("quantize", *arguments)
    assert ended.code == code
    assert said in ended.err
    assert not (tmp_path / "out").exists()
    assert not unfinished(tmp_path).exists()
    assert (tmp_path / "taken/file").read_text() == "precious"


def test_nan_is_refused_and_named(olq, tmp_path):
    shutil.copytree(DENSE, tmp_path / "broken")
    tensors = load_file(DENSE / "model.safetensors")
    name = next(name for name in reversed(tensors) if name.endswith("down_proj.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, tmp_path / "broken/model.safetensors", {"format": "pt"})
    ended = olq("quantize", "broken", "out", "-q", "int8", *SMALL)
    assert ended.code == 4
    assert name in ended.err
    assert not os.path.exists("out")


def test_a_model_that_is_quantized_already(olq, tmp_path):
    assert olq("quantize", str(DENSE), "out", "-q", "int8").code == 0
    ended = olq("quantize", "out", "again", "-q", "int8")
    assert ended.code == 2
    assert "quantized by olq_fx already" in ended.err
