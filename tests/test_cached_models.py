"""The automatic cache: a hit maps, a miss converts and fills, and a change of anything is a miss."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from olq_fx import tensor_files
from olq_fx.cached_models import cached_load
from olq_fx.errors import ConfigurationError, OlqFxWarning
from olq_fx.quantize import quantize_


def source_at(path: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    path.mkdir(exist_ok=True)
    save_file(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).state_dict(), path / "model.safetensors")
    return path


def planned(scheme: str = "int8") -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    quantize_(model, scheme)
    return model


def load(source: Path, cache: Path, scheme: str = "int8", options: tuple[object, ...] = ()) -> tuple[nn.Module, bool]:
    model = planned(scheme)
    state = load_file(source / "model.safetensors")
    hit = cached_load(model, source, cache, lambda: model.load_state_dict(state, assign=True), options=options)
    return model, hit


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_the_second_time_it_is_a_hit_with_the_same_bytes(tmp_path: Path):
    source = source_at(tmp_path / "source")
    first, hit = load(source, tmp_path / "cache")
    assert not hit
    second, hit = load(source, tmp_path / "cache")
    assert hit
    assert_equal(first, second)


def test_another_plan_option_or_content_is_a_miss(tmp_path: Path):
    source = source_at(tmp_path / "source")
    load(source, tmp_path / "cache")
    assert not load(source, tmp_path / "cache", "mxfp4")[1]
    assert not load(source, tmp_path / "cache", options=(torch.float16,))[1]
    before = (source / "model.safetensors").stat()
    source_at(source, seed=1)
    os.utime(source / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    model, hit = load(source, tmp_path / "cache")  # of the same size and time
    assert not hit
    os.utime(source / "model.safetensors", ns=(1, 1))
    assert not load(source, tmp_path / "cache")[1]
    assert load(source, tmp_path / "cache")[1]
    del model


def test_a_damaged_entry_is_made_anew(tmp_path: Path):
    source = source_at(tmp_path / "source")
    first, _ = load(source, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    os.truncate(entry / "model.safetensors", 100)
    with pytest.warns(OlqFxWarning, match="made anew"):
        again, hit = load(source, tmp_path / "cache")
    assert not hit
    assert_equal(first, again)
    assert load(source, tmp_path / "cache")[1]


def test_a_full_disk_leaves_the_model_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def write(file: object, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files, "_write", write)
    with pytest.warns(OlqFxWarning, match="not cached.*No space left"):
        model, hit = load(source_at(tmp_path / "source"), tmp_path / "cache")
    assert not hit
    assert model(torch.ones(1, 64)).isfinite().all()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_source_that_is_no_path_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="cache_dir goes with"):
        cached_load(planned(), {"a": torch.ones(1)}, tmp_path, lambda: None)


FILLING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_cached_models import load
model, hit = load(Path(sys.argv[2]), Path(sys.argv[3]))
print(float(sum(value.double().sum() for value in model.state_dict().values())))
"""


def filling(code: str, source: Path, cache: Path) -> "subprocess.Popen[str]":
    """A process that runs the code with its arguments."""
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(source), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


# Two rounds of imports are most of what it takes.
@pytest.mark.slow
def test_two_processes_fill_one_cache(tmp_path: Path):
    source = source_at(tmp_path / "source")
    processes = [filling(FILLING, source, tmp_path / "cache") for _ in range(2)]
    found = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert found[0] == found[1] != ""
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert load(source, tmp_path / "cache")[1]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from olq_fx import tensor_files
from test_cached_models import load
write, count = tensor_files._write, 0
def dying(file, content):
    global count
    count += 1
    if count == 3:
        write(file, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write(file, content)
tensor_files._write = dying
load(Path(sys.argv[2]), Path(sys.argv[3]))
"""


def test_a_writer_killed_midway_leaves_a_usable_cache(tmp_path: Path):
    source, cache = source_at(tmp_path / "source"), tmp_path / "cache"
    process = filling(KILLED, source, cache)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    left = {path.name for path in cache.iterdir()}
    assert left  # it died while it wrote
    first, hit = load(source, cache)
    assert not hit
    again, hit = load(source, cache)
    assert hit
    assert_equal(first, again)
    assert len(list(cache.iterdir())) == 1  # what the killed one has left is gone
