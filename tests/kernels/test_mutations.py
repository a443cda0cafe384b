"""The mutation check: small faults put into the device functions must be noticed by what test_device.py tries.

Each line of `olq_fx.kernels.device`, `device_scales` and `device_producers` is changed by the operators of
mutations.py, one place at a time, and a copy of the modules with that one fault runs through the checks in an
interpreter, until one fails. What no check notices must stand in SURVIVORS with the reason why it changes nothing, or
nothing that an interpreter could see.

`python tests/kernels/test_mutations.py` prints the figures and the survivors; with names of modules, of these only.
"""

import collections
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import device_checks
import device_kernels
import producer_checks
import producer_kernels
import pytest
from mutations import Mutation, mutations

from olq_fx.kernels import device, device_producers, device_scales
from olq_fx.testing import Interpreter, ProcessDied


@dataclasses.dataclass(frozen=True)
class Suite:
    """Modules that are mutated.

    Attributes:
        modules: they may import from each other.
        kernels: applies their functions.
        kills: the checks.
    """

    modules: tuple[ModuleType, ...]
    kernels: ModuleType
    kills: Callable[[str, int, Sequence[str]], str]


SUITES = (
    Suite((device, device_scales), device_kernels, device_checks.kills),
    Suite((device_producers,), producer_kernels, producer_checks.kills),
)
UNMUTATED = {"device_maxima", "device_experts"}
"""Files whose functions are tried in whole products only, which takes too long for each fault: by test_on_load.py, and
by test_triton_grouped.py and test_triton_experts.py.
"""

LEAST_SHARE = 0.95

_NAN = "every NaN is as good as another"
_FIRST_NORMAL = "2^-6 itself, and its neighbours, have the same code by both branches"
_NATIVE = "both branches have the same bits; that sm_80 has no cast to float8 is held by the tests of machine code"
_SAME_STEP = "at the limit itself both branches have the same code"
_OUTSIDE = "the result is 0 beyond column K, whatever is read there"

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
    (
        "reciprocal_root",
        "tl.div_rn(tl.full(variance.shape, 1.0, tl.float32), tl.sqrt_rn(variance + eps))",
        "tl.full(variance.shape, 1.0, tl.float32) * (1.0 / tl.sqrt_rn(variance + eps))",
    ): "the interpreter divides as IEEE 754 says; that no GPU divides otherwise is held by the tests of machine code",
    ("normed", "0.0 in tl.load(weight + columns, mask=columns < K, other=0.0)", "1.0"): _OUTSIDE,
    ("normed", "0.0 in tl.load(bias + columns, mask=columns < K, other=0.0)", "1.0"): _OUTSIDE,
    ("relu_squared", "x < 0.0", "x <= 0.0"): "the square of either zero is 0.0",
    ("_halved", "first, second = tl.split(halves)", "second, first = tl.split(halves)"): "a sum of two has no order",
}


def written(folder: pathlib.Path, number: int, suite: Suite, module: ModuleType, source: str) -> None:
    """Copies of a suite's modules and of the kernels that apply them, with `source` for one of them."""
    names = {found.__name__: f"mutant_{number}_{found.__name__.rpartition('.')[2]}" for found in suite.modules}
    sources = {found.__name__: pathlib.Path(str(found.__file__)).read_text() for found in suite.modules}
    sources[module.__name__] = source
    sources["kernels"] = pathlib.Path(str(suite.kernels.__file__)).read_text()
    names["kernels"] = f"mutant_{number}_kernels"
    for name, text in sources.items():
        for found in suite.modules:
            text = text.replace(f"from {found.__name__} import", f"from {names[found.__name__]} import")
        (folder / f"{names[name]}.py").write_text(text)


def survivors(
    folder: pathlib.Path, chosen: Sequence[str] = ()
) -> tuple[dict[tuple[str, str, str], Mutation], dict[str, collections.Counter[str]]]:
    """The mutations that no check notices, and of each module how many there are by operator."""
    found: dict[tuple[str, str, str], Mutation] = {}
    counts: dict[str, collections.Counter[str]] = {}
    number = 0
    with Interpreter(timeout=60) as interpreter:
        for suite in SUITES:
            for module in suite.modules:
                source = pathlib.Path(str(module.__file__)).read_text()
                name = module.__name__.rpartition(".")[2]
                if chosen and name not in chosen:
                    continue
                written(folder, number, suite, module, source)
                assert interpreter.call(suite.kills, str(folder), number, []) == ""
                counts[name] = collections.Counter()
                for mutation in mutations(source):
                    number += 1
                    counts[name][mutation.operator] += 1
                    written(folder, number, suite, module, mutation.source)
                    if not _killed(interpreter, suite, folder, number, mutation):
                        found[mutation.key] = mutation
                number += 1
    return found, counts


def _killed(interpreter: Interpreter, suite: Suite, folder: pathlib.Path, number: int, mutation: Mutation) -> str:
    try:
        return str(interpreter.call(suite.kills, str(folder), number, [mutation.function]))
    except ProcessDied:
        return "the process"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_faults_are_noticed(tmp_path):
    found, counts = survivors(tmp_path)
    assert set().union(*counts.values()) == {"comparison", "constant", "rounding", "mask", "index"}
    unknown = {key: mutation for key, mutation in found.items() if key not in SURVIVORS}
    assert not unknown, "no check notices these: add one, or say in SURVIVORS why they change nothing"
    assert not SURVIVORS.keys() - found.keys(), "noticed, or gone from the source"
    assert len(found) <= (1 - LEAST_SHARE) * sum(counter.total() for counter in counts.values())


def test_every_file_of_device_functions_is_mutated():
    files = pathlib.Path(str(device.__file__)).parent.glob("device*.py")
    mutated = {module.__name__.rpartition(".")[2] for suite in SUITES for module in suite.modules}
    assert {file.stem for file in files} - UNMUTATED == mutated


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
        found, counts = survivors(pathlib.Path(folder), sys.argv[1:])
    for module, count in counts.items():
        print(f"{module}: {count.total()} mutations: {', '.join(f'{n} {name}' for name, n in count.most_common())}")
    total = sum(count.total() for count in counts.values())
    print(f"{total} mutations, {total - len(found)} noticed, {1 - len(found) / total:.1%}")
    for key, mutation in found.items():
        print(f"{mutation.line}: {key}: {SURVIVORS.get(key, 'UNKNOWN')}", file=sys.stderr)


if __name__ == "__main__":
    main()
