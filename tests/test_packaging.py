"""What is built from the tree: a wheel that holds each file once and works outside of it."""

import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SMOKE = """
import importlib.metadata, sys, torch, olq_fx, olq_fx.passes, olq_fx.kernels
assert olq_fx.__file__.startswith(sys.argv[1]), olq_fx.__file__
assert importlib.metadata.version("olq-fx") == olq_fx.__version__
model = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.ReLU(), torch.nn.Linear(24, 8))
x = torch.randn(3, 40)
expected = torch.compile(model, backend="olq_fx", options={"scheme": "mxfp8", "inner": "eager"})(x)
assert torch.equal(model(x), expected)
for scheme in olq_fx.SCHEMES:
    model = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.ReLU(), torch.nn.Linear(24, 8))
    olq_fx.quantize_(model, scheme)
    assert model(x).isfinite().all()
print("smoke test passed")
"""


def sources() -> dict[str, Path]:
    """Every file that belongs in the wheel, by its name there."""
    mapped = {
        "olq_fx": "olq_fx",
        "olq_fx/integrations": "olq_fx/integrations",
        "olq_fx/passes": "passes",
        "olq_fx/kernels": "kernels",
        "olq_fx/kernels/tuned": "kernels/tuned",
    }
    return {
        f"{package}/{path.name}": path
        for package, folder in mapped.items()
        for path in (ROOT / folder).iterdir()
        if path.is_file() and not path.is_symlink() and path.suffix != ".pyc"
    }


def copy_of_the_tree(target: Path) -> Path:
    """The files that git knows or would add, links as links: what a fresh clone would hold."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        elif source.exists():
            copy.write_bytes(source.read_bytes())
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of a copy of the tree, and the wheel that was built from that sdist."""
    tree = copy_of_the_tree(tmp_path_factory.mktemp("tree"))
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [path] = built.glob("*.whl")
    return path


def test_wheel_holds_every_source_once_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert len(set(names)) == len(names)
        held = {name: archive.read(name) for name in names if ".dist-info/" not in name}
    assert held == {name: path.read_bytes() for name, path in sources().items()}


def test_wheel_says_what_it_is(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        info = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert info["top_level.txt"].split() == ["olq_fx"]
    assert "[torch_dynamo_backends]\nolq_fx = olq_fx.dynamo:dynamo_backend" in info["entry_points.txt"]
    assert "[console_scripts]\nolq-fx = olq_fx.cli:entry" in info["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in info["METADATA"]
    assert "Apache License" in info["LICENSE"]
    assert wheel.name.endswith("-py3-none-any.whl")


def test_sdist_holds_every_source_once(built: Path):
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [Path(*Path(m.name).parts[1:]).as_posix() for m in archive.getmembers() if m.isfile()]
    assert not [name for name, count in Counter(names).items() if count > 1]
    shipped = {name for name in names if name.partition("/")[0] in {"olq_fx", "passes", "kernels"}}
    assert shipped == {path.relative_to(ROOT).as_posix() for path in sources().values()}
    assert {"LICENSE", "NOTICE", "README.md", "pyproject.toml"} <= set(names)


def test_wheel_works_outside_of_the_tree(wheel: Path, tmp_path: Path):
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(target)!r})\n{SMOKE}", str(target)],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("smoke test passed\n"), done.stderr
