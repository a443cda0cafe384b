"""constraints.txt pins what pyproject.toml asks for, and torch together with the triton that torch itself requires."""

import importlib.metadata
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "constraints.txt").read_text()
PINS = [Requirement(line) for line in TEXT.splitlines() if line and not line.startswith("#")]
LINES = [dict(pin.split("==") for pin in line[2:].split()) for line in TEXT.splitlines() if line.startswith("#:")]
PAIRS = {line["torch"]: line["triton"] for line in LINES}
# What the CUDA builds of torch ask for in their metadata, and the newest release is not; a CPU build may ask for less.
WANTED = {"2.11.0": "setuptools<82", "2.12.0": "setuptools<82", "2.14.1": "setuptools>=77.0.3"}


def pinned(name: str, python: str = "3.11") -> list[str]:
    """The versions to which `name` is pinned on Linux with that Python."""
    environment = {"python_full_version": f"{python}.9", "python_version": python, "sys_platform": "linux"}
    return [
        next(iter(pin.specifier)).version
        for pin in PINS
        if canonicalize_name(pin.name) == canonicalize_name(name)
        and (pin.marker is None or pin.marker.evaluate(environment))
    ]


def pinned_beside(torch: str, name: str) -> str:
    """The version of `name` that is installed with that torch, by its own line or by that of all pairs."""
    [line] = [line for line in LINES if line["torch"] == torch]
    return line.get(name) or next(iter(pinned(name)))


def installed(name: str) -> Version:
    return Version(Version(importlib.metadata.version(name)).public)


def requirements() -> list[Requirement]:
    """What the project itself asks for, extras included."""
    found = [Requirement(text) for text in importlib.metadata.requires("olq-fx") or ()]
    return [requirement for requirement in found if requirement.name != "olq-fx"]


def is_wanted(name: str, python: str) -> bool:
    """Whether the project or one of its extras asks for `name` on Linux with that Python."""
    extras = importlib.metadata.metadata("olq-fx").get_all("Provides-Extra") or []
    environment = {"python_full_version": f"{python}.9", "python_version": python, "sys_platform": "linux"}
    return any(
        requirement.marker is None or requirement.marker.evaluate({**environment, "extra": extra})
        for requirement in requirements()
        if requirement.name == name
        for extra in ("", *extras)
    )


def test_every_line_is_an_exact_pin():
    loose = [str(pin) for pin in PINS if [s.operator for s in pin.specifier] != ["=="]]
    assert not loose


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize("name", sorted({requirement.name for requirement in requirements()}))
def test_every_requirement_is_pinned_once_where_it_is_wanted(name: str, python: str):
    assert len(pinned(name, python)) == is_wanted(name, python)


def test_the_default_pair_is_the_one_that_is_pinned():
    assert next(iter(PAIRS.items())) == (*pinned("torch"), *pinned("triton"))


def test_pairs_cover_what_is_supported():
    [torch] = [r for r in map(Requirement, importlib.metadata.requires("olq-fx") or ()) if r.name == "torch"]
    minors = {Version(version).minor for version in PAIRS}
    assert minors == set(range(11, 15))
    assert all(version in torch.specifier for version in PAIRS)
    assert "2.10.0" not in torch.specifier
    assert "2.15.0" not in torch.specifier


def test_installed_triton_is_the_partner_of_installed_torch():
    assert str(installed("triton")) == PAIRS[str(installed("torch"))]


def test_pins_agree_with_the_metadata_of_installed_torch():
    """A CPU build of torch states no triton: then there is nothing that could disagree."""
    torch = str(installed("torch"))
    stated = [Requirement(text) for text in importlib.metadata.requires("torch") or ()]
    asked = [r for r in stated if (r.marker is None or r.marker.evaluate()) and (r.name in LINES[0] or pinned(r.name))]
    assert "filelock" in {r.name for r in asked}
    assert not [str(r) for r in asked if pinned_beside(torch, r.name) not in r.specifier]


@pytest.mark.parametrize(("torch", "requirement"), WANTED.items())
def test_pins_agree_with_the_metadata_of_cuda_builds(torch: str, requirement: str):
    wanted = Requirement(requirement)
    assert pinned_beside(torch, wanted.name) in wanted.specifier


def made(folder: Path, torch: str) -> list[str]:
    """The pins that `make TORCH=...` installs by."""
    file = folder / "constraints.txt"
    command = ["make", "--silent", str(file), f"VENV={folder}", f"TORCH={torch}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["torch"])
def test_make_installs_the_pair_that_it_is_asked_for(tmp_path: Path, line: dict[str, str]):
    found = made(tmp_path, line["torch"])
    own = [f"{name}=={version}" for name, version in line.items()]
    others = [str(pin) for pin in PINS if pin.name not in line]
    assert found[: len(own)] == own
    assert list(map(str, map(Requirement, found[len(own) :]))) == others


def test_make_installs_what_is_pinned_where_it_is_asked_for_nothing(tmp_path: Path):
    assert list(map(Requirement, made(tmp_path, ""))) == PINS


def test_make_refuses_a_torch_without_a_partner(tmp_path: Path):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        made(tmp_path, "2.10.0")
    assert "constraints.txt names no pair for torch 2.10.0" in caught.value.stdout
    assert not list(tmp_path.iterdir())
