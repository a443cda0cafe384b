"""The layout that packaging and the static tools rest on, and the list of public names.

`passes/` and `kernels/` are packages of olq_fx by the mapping of setuptools; the links
in olq_fx/ serve tools that only read files.
"""

import inspect
import os
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import olq_fx

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
MAPPED = {"olq_fx": "olq_fx", "olq_fx.passes": "passes", "olq_fx.kernels": "kernels"}


def setuptools_section() -> dict[str, Any]:
    section: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return section


def package_folders() -> dict[str, Path]:
    """Every folder with Python files under the mapped ones, links not followed, by the name of its package."""
    found = {}
    for package, folder in MAPPED.items():
        for here, _, files in os.walk(ROOT / folder):
            if any(name.endswith(".py") for name in files):
                below = Path(here).relative_to(ROOT / folder).parts
                found[".".join([package, *below])] = Path(here)
    return found


def test_every_package_is_listed():
    """An unlisted sub-package is absent from the wheel in silence, while the editable install works."""
    assert sorted(setuptools_section()["packages"]) == sorted(package_folders())


def test_mapping_is_the_layout():
    assert setuptools_section()["package-dir"] == MAPPED


@pytest.mark.parametrize("name", ["passes", "kernels"])
def test_link_is_relative_and_points_at_the_folder(name: str):
    link = ROOT / "olq_fx" / name
    if not link.is_symlink():
        assert link.read_text() == f"../{name}", "without links in the checkout, git leaves their text"
        return
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == (ROOT / name).resolve()


def test_every_data_file_is_listed():
    """Whatever is no Python file must be named as package data, or the wheel lacks it."""
    listed = setuptools_section()["package-data"]
    for package, folder in package_folders().items():
        for file in folder.iterdir():
            if file.is_file() and not file.is_symlink() and file.suffix not in {".py", ".pyc"}:
                assert any(fnmatch(file.name, pattern) for pattern in listed.get(package, ())), file


def test_all_is_what_is_public():
    """`compare` is there on first use only."""
    olq_fx.compare  # noqa: B018
    public = {
        name for name, value in vars(olq_fx).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert sorted(set(olq_fx.__all__) - {"__version__"}) == sorted(public)
    assert len(set(olq_fx.__all__)) == len(olq_fx.__all__)


@pytest.mark.parametrize("name", [name for name in olq_fx.__all__ if callable(getattr(olq_fx, name))])
def test_public_callables_are_documented_and_typed(name: str):
    thing = getattr(olq_fx, name)
    assert thing.__doc__
    if inspect.isfunction(thing):
        signature = inspect.signature(thing)
        untyped = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
        assert not untyped
        assert signature.return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("name", olq_fx.__all__)
def test_public_names_are_in_the_readme(name: str):
    assert re.search(rf"\b{re.escape(name)}\b", (ROOT / "README.md").read_text())


@pytest.mark.parametrize("package", ["passes", "kernels"])
def test_index_of_a_package_names_every_file(package: str):
    """The docstring of the package is its index: a newcomer's way in."""
    index = (ROOT / package / "__init__.py").read_text()
    files = [path.name for path in (ROOT / package).iterdir() if path.suffix in {".py", ".cpp", ".h"}]
    missing = [name for name in files if name != "__init__.py" and not re.search(rf"\b{Path(name).stem}\b", index)]
    assert not missing
