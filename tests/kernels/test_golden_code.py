"""The machine code of every kernel that ships is no worse than a table kept before; without one, absolute rules hold.

`python tests/kernels/test_golden_code.py` (or `make golden`) writes the table of the triton that is installed anew.
"""

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import triton

from olq_fx.formats import FORMATS
from olq_fx.kernels.triton_catalog import CAPABILITIES, SOURCES, Entry, catalog, entries
from olq_fx.testing import Compiler
from olq_fx.testing_kernel_table import SLACK, CodeRow, code_row, faults, from_json, to_json, worsened

MINOR = ".".join(triton.__version__.split(".")[:2])
GOLDEN = Path(__file__).parent / "golden"
TABLE = GOLDEN / f"triton-{MINOR}.json"


def representatives(capability: int) -> list[Entry]:
    """For each kernel the first entry of each element: what is compiled without the marker `slow`."""
    found: dict[tuple[str, str], Entry] = {}
    for entry in catalog(capability):
        elements = [FORMATS[name].element for name in entry.formats[:1] if name in FORMATS]
        found.setdefault((entry.call.kernel.fn.__name__, "".join(elements)), entry)
    return list(found.values())


@pytest.fixture(scope="module")
def compiler():
    with Compiler() as started:
        yield started


@functools.cache
def compiled(compiler: Compiler, name: str, capability: int) -> CodeRow:
    [entry] = [entry for entry in catalog(capability) if entry.name == name]
    return code_row(compiler, entry, capability)


def found_faults(compiler: Compiler, chosen: list[Entry], capability: int) -> list[str]:
    return [fault for entry in chosen for fault in faults(compiled(compiler, entry.name, capability))]


def found_worse(compiler: Compiler, chosen: list[Entry], capability: int) -> list[str]:
    if not TABLE.exists():
        pytest.skip(f"there is no golden table of triton {MINOR}: the absolute rules alone hold the kernels")
    golden = from_json(TABLE.read_text())
    return [said for entry in chosen for said in worsened(compiled(compiler, entry.name, capability), golden)]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_absolute_rules_hold_also_where_this_triton_has_no_golden_table(compiler, capability):
    assert found_faults(compiler, representatives(capability), capability) == []


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nothing_is_worse_than_in_the_golden_table_of_this_triton(compiler, capability):
    assert found_worse(compiler, representatives(capability), capability) == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_absolute_rules_hold_for_the_whole_catalog_also_without_a_golden_table(compiler, capability):
    assert found_faults(compiler, list(catalog(capability)), capability) == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nothing_of_the_whole_catalog_is_worse_than_in_the_golden_table(compiler, capability):
    assert found_worse(compiler, list(catalog(capability)), capability) == []


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_a_golden_table_has_every_kernel_and_no_other_one(path):
    shipped = {(entry.name, capability) for capability in CAPABILITIES for entry in catalog(capability)}
    golden = from_json(path.read_text())
    assert shipped == set(golden), "run `make golden` with that triton"
    wanted = {(entry.name, cap): entry.instruction for cap in CAPABILITIES for entry in catalog(cap)}
    assert [said for row in golden.values() for said in faults(dataclasses.replace(row, wanted=wanted[row.key]))] == []


def test_a_golden_table_is_kept_of_every_triton_that_a_supported_torch_has():
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text()
    minors = set(re.findall(r"^#:.* triton==(\d+\.\d+)\.", constraints, re.MULTILINE))
    assert minors
    assert {path.stem for path in GOLDEN.glob("*.json")} == {f"triton-{minor}" for minor in minors}


def test_representatives_are_of_every_kernel_and_every_family():
    for capability in CAPABILITIES:
        chosen = representatives(capability)
        kernels = {entry.call.kernel for entry in catalog(capability)}
        assert {entry.call.kernel for entry in chosen} == kernels
        for source in SOURCES:
            names = {entry.name for entry in source(capability)}
            assert names.intersection(entry.name for entry in chosen)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_catalog_is_complete(capability):
    listed = catalog(capability)
    for format in FORMATS.values():
        named = [entry.name for entry in listed if format.name in entry.formats]
        assert any(name.startswith(f"dequantize {format.name}:") for name in named)
        for rule in format.rules:
            assert any(name.startswith(f"quantize {format.name} {rule}:") for name in named)
    tensors = [arg for entry in listed for arg in entry.call.args if hasattr(arg, "is_meta")]
    assert all(tensor.is_meta for tensor in tensors)


def test_names_of_the_catalog_are_unique(monkeypatch):
    monkeypatch.setattr("olq_fx.kernels.triton_catalog.SOURCES", (SOURCES[0], SOURCES[0]))
    with pytest.raises(ValueError, match="with the same name: quantize"):
        catalog(90)


def test_entries_name_operation_and_kernel():
    first = SOURCES[0](90)[0]
    [made] = entries("multiply", ["mxfp8"], [first.call], "wgmma")
    assert (made.name, made.formats, made.instruction) == ("multiply: tensor_amax", ("mxfp8",), "wgmma")


# What a table finds


ROW = CodeRow("multiply: product", ("mxfp8",), 90, "e4m3", ("wgmma.e4m3",), 168, 0, 0, 200_000)


def test_a_table_survives_being_written():
    rows = [ROW, dataclasses.replace(ROW, capability=100, registers=255, instructions=())]
    back = from_json(to_json("3.7.1", rows))
    assert back == {row.key: dataclasses.replace(row, formats=(), wanted="") for row in rows}
    assert to_json("3.7.1", back.values()) == to_json("3.7.1", reversed(rows))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"instructions": ()}, "matrix instructions"),
        ({"instructions": ("mma.sync.f16",)}, "matrix instructions"),
        ({"instructions": ("mma.sync.f16", "wgmma.e4m3")}, "matrix instructions"),
        ({"registers": 168 + SLACK + 1}, f"{169 + SLACK} registers, before 168"),
        ({"stack": 8}, "stack 8, before 0"),
        ({"spills": 1}, "spills 1, before 0"),
        ({"name": "another"}, "is not in the golden table"),
        ({"capability": 100}, "is not in the golden table"),
    ],
    ids=str,
)
def test_what_is_worse_is_said(change, said):
    [found] = worsened(dataclasses.replace(ROW, **change), {ROW.key: ROW})
    assert said in found


@pytest.mark.parametrize("change", [{}, {"registers": 168 + SLACK}, {"registers": 32}, {"shared_memory": 1}], ids=str)
def test_what_is_no_worse_passes(change):
    assert worsened(dataclasses.replace(ROW, **change), {ROW.key: ROW}) == []
    assert faults(dataclasses.replace(ROW, **change)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stack": 8}, "8 bytes of stack"),
        ({"spills": 3}, "3 accesses to local memory"),
        ({"shared_memory": 232449}, "232449 bytes of shared memory, the limit being 232448"),
        ({"shared_memory": 101377, "capability": 120}, "the limit being 101376"),
        ({"instructions": ()}, "no matrix instruction, not e4m3"),
        ({"instructions": ("mma.sync.f16", "wgmma.e4m3")}, "mma.sync.f16, not e4m3"),
        ({"wanted": ""}, "no matrix instruction is wanted"),
    ],
    ids=str,
)
def test_absolute_rules(change, said):
    [found] = faults(dataclasses.replace(ROW, **change))
    assert said in found


def rewrite() -> None:
    """Compile the whole catalogue and write the table of this triton."""
    with Compiler() as compiler:
        rows = [code_row(compiler, entry, capability) for capability in CAPABILITIES for entry in catalog(capability)]
    problems = [fault for row in rows for fault in faults(row)]
    if problems:
        raise SystemExit("\n".join(["the table is not written:", *problems]))
    GOLDEN.mkdir(exist_ok=True)
    TABLE.write_text(to_json(triton.__version__, rows))


if __name__ == "__main__":
    rewrite()
