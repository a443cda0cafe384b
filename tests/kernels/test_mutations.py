"""The mutation check: small faults put into the device functions must be noticed by what test_device.py tries.

Each line of `olq_fx.kernels.device` and `device_scales` is changed by the operators of mutations.py, one place at a
time, and a copy of the modules with that one fault runs through the checks in an interpreter, until one fails. What no
check notices must stand in SURVIVORS with the reason why it changes nothing, or nothing that an interpreter could see.

`python tests/kernels/test_mutations.py` prints the figures and the survivors.
"""

import collections
import pathlib
import sys

import device_checks
import device_kernels
import pytest
from mutations import Mutation, mutations

from olq_fx.kernels import device, device_scales
from olq_fx.testing import Interpreter, ProcessDied

MODULES = (device, device_scales)
LEAST_SHARE = 0.95

_NAN = "every NaN is as good as another"
_FIRST_NORMAL = "2^-6 itself, and its neighbours, have the same code by both branches"
_NATIVE = "both branches have the same bits; that sm_80 has no cast to float8 is held by the tests of machine code"
_SAME_STEP = "at the limit itself both branches have the same code"
_DISCARDED = "changes what is computed beside codes 0 and 1 only, for which `where` takes the other case"

SURVIVORS: dict[tuple[str, str, str], str] = {
    ("", "2147483648 in -2147483648", "2147483647"): "of the bits shifted left by 24 or 28, the lowest is 0",
    ("", "2143289344 in tl.constexpr(2143289344)", "2143289345"): _NAN,
    ("", "2143289344 in tl.constexpr(2143289344)", "2143289343"): _NAN,
    ("encode_e4m3", "if NATIVE", "if not NATIVE"): _NATIVE,
    ("encode_e4m3", "size < 1015021568", "size <= 1015021568"): _FIRST_NORMAL,
    ("encode_e4m3", "1015021568 in size < 1015021568", "1015021569"): _FIRST_NORMAL,
    ("encode_e4m3", "1015021568 in size < 1015021568", "1015021567"): _FIRST_NORMAL,
    ("encode_e4m3", "24 in bits >> 24", "25"): "the shift repeats the sign: bit 7 is the sign by both",
    ("encode_e2m1", "size < 4.0", "size <= 4.0"): _SAME_STEP,
    ("encode_e2m1", "size < 2.0", "size <= 2.0"): _SAME_STEP,
    ("round_e2m1", "size < 4.0", "size <= 4.0"): _SAME_STEP,
    ("round_e2m1", "size < 2.0", "size <= 2.0"): _SAME_STEP,
    ("round_e2m1", "quotient < 0.0", "quotient <= 0.0"): "its zero has no sign that counts",
    (
        "decode",
        "True in codes.to(tl.int8, bitcast=True)",
        "False",
    ): "a cast between integers of one width keeps the bits",
    ("decode_e4m3", "if NATIVE", "if not NATIVE"): _NATIVE,
    ("decode_e2m1", "size < 2", "size <= 2"): "code 2 decodes to 1.0 by both branches",
    ("decode_e2m1", "2 in size < 2", "3"): "code 2 decodes to 1.0 by both branches",
    ("decode_e2m1", "tl.maximum(size >> 1, 1)", "size >> 1"): _DISCARDED,
    ("decode_e2m1", "1 in tl.maximum(size >> 1, 1)", "0"): _DISCARDED,
    ("_halved", "first, second = tl.split(halves)", "second, first = tl.split(halves)"): "a sum of two has no order",
}


def written(folder: pathlib.Path, number: int, module: object, mutation: Mutation) -> None:
    """Copies of the modules and of the kernels that apply them, with one changed."""
    names = {found.__name__: f"mutant_{number}_{found.__name__.rpartition('.')[2]}" for found in MODULES}
    sources = {found.__name__: pathlib.Path(found.__file__).read_text() for found in MODULES}
    sources[module.__name__] = mutation.source
    sources["kernels"] = pathlib.Path(device_kernels.__file__).read_text()
    names["kernels"] = f"mutant_{number}_kernels"
    for name, text in sources.items():
        for found in MODULES:
            text = text.replace(f"from {found.__name__} import", f"from {names[found.__name__]} import")
        (folder / f"{names[name]}.py").write_text(text)


def survivors(folder: pathlib.Path) -> tuple[dict[tuple[str, str, str], Mutation], collections.Counter[str]]:
    """The mutations that no check notices, and how many there are by operator."""
    found: dict[tuple[str, str, str], Mutation] = {}
    counts: collections.Counter[str] = collections.Counter()
    number = 0
    with Interpreter(timeout=60) as interpreter:
        unchanged = Mutation("", "", 0, "", "", pathlib.Path(device.__file__).read_text())
        written(folder, number, device, unchanged)
        assert interpreter.call(device_checks.kills, str(folder), number, []) == ""
        for module in MODULES:
            for mutation in mutations(pathlib.Path(module.__file__).read_text()):
                number += 1
                counts[mutation.operator] += 1
                written(folder, number, module, mutation)
                try:
                    killed = interpreter.call(device_checks.kills, str(folder), number, [mutation.function])
                except ProcessDied:
                    killed = "the process"
                if not killed:
                    found[mutation.key] = mutation
    return found, counts


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_faults_are_noticed(tmp_path):
    found, counts = survivors(tmp_path)
    assert set(counts) == {"comparison", "constant", "rounding", "mask", "index"}
    unknown = {key: mutation for key, mutation in found.items() if key not in SURVIVORS}
    assert not unknown, "no check notices these: add one, or say in SURVIVORS why they change nothing"
    assert not SURVIVORS.keys() - found.keys(), "noticed, or gone from the source"
    assert len(found) <= (1 - LEAST_SHARE) * counts.total()


def test_mutations_are_made_by_every_operator():
    """On a function of a few lines, so that the generator itself is tested where the slow test does not run."""
    source = "@jit\ndef f(x, y):\n    a, b = g(x)\n    return tl.where(x < 1, rounded(tl.div_rn(a, b)) << 2, -y)\n"
    made = mutations(source)
    assert {mutation.operator for mutation in made} == {"comparison", "constant", "rounding", "mask", "index"}
    assert len({mutation.source for mutation in made}) == len(made)
    assert all(mutation.source != source and mutation.function == "f" for mutation in made)
    texts = [mutation.source for mutation in made]
    for part in (
        "x <= 1",
        "x > 1",
        "x < 2",
        "x < 0",
        "a * (1.0 / b)",
        "tl.floor(",
        ">> 2",
        "<< 3",
        ", y)",
        "b, a = g(x)",
    ):
        assert any(part in text for text in texts), part


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found, counts = survivors(pathlib.Path(folder))
    print(f"{counts.total()} mutations: {', '.join(f'{count} {name}' for name, count in counts.most_common())}")
    print(f"{counts.total() - len(found)} noticed, {1 - len(found) / counts.total():.1%}")
    for key, mutation in found.items():
        print(f"{mutation.line}: {key}: {SURVIVORS.get(key, 'UNKNOWN')}", file=sys.stderr)


if __name__ == "__main__":
    main()
