"""constraints.txt pins what pyproject.toml asks for, and torch together with the triton that torch itself requires."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "constraints.txt").read_text()
PINS = [Requirement(line) for line in TEXT.splitlines() if line and not line.startswith("#")]
PAIRS = dict(re.findall(r"^#: torch==(\S+) triton==(\S+)$", TEXT, re.MULTILINE))


def pinned(name: str, python: str = "3.11") -> list[str]:
    """The versions to which `name` is pinned on Linux with that Python."""
    environment = {"python_full_version": f"{python}.9", "python_version": python, "sys_platform": "linux"}
    return [
        next(iter(pin.specifier)).version
        for pin in PINS
        if canonicalize_name(pin.name) == canonicalize_name(name)
        and (pin.marker is None or pin.marker.evaluate(environment))
    ]


def installed(name: str) -> Version:
    return Version(Version(importlib.metadata.version(name)).public)


def direct_requirements() -> list[str]:
    """What the project itself asks for, extras included."""
    names = {Requirement(text).name for text in importlib.metadata.requires("olq-fx") or ()}
    return sorted(names - {"olq-fx"})


def test_every_line_is_an_exact_pin():
    loose = [str(pin) for pin in PINS if [s.operator for s in pin.specifier] != ["=="]]
    assert not loose


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize("name", direct_requirements())
def test_every_requirement_is_pinned_once(name: str, python: str):
    assert len(pinned(name, python)) == 1


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


def test_pin_agrees_with_the_metadata_of_torch():
    """A CUDA build of torch states its triton; a CPU build states none, then there is nothing that could disagree."""
    stated = [Requirement(text) for text in importlib.metadata.requires("torch") or ()]
    versions = [r.specifier for r in stated if r.name == "triton" and (r.marker is None or r.marker.evaluate())]
    assert all(PAIRS[str(installed("torch"))] in specifier for specifier in versions)
