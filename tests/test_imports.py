"""Who imports whom, and what `import olq_fx` does to a process: as little as can be."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from olq_fx.passes import pipeline

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("olq_fx", "passes", "kernels") for path in (ROOT / folder).glob("*.py"))
SUBCLASS_PROTOCOL = {"torch.Tensor._make_wrapper_subclass", "torch._C.DisableTorchFunctionSubclass"}
"""Underscored, but documented: what every tensor subclass is made of."""


def fresh(code: str, cwd: Path = ROOT) -> str:
    """What `code` prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lint_contracts(tree: Path) -> subprocess.CompletedProcess[str]:
    code = "import importlinter.cli as c; raise SystemExit(c.lint_imports(no_cache=True, no_logo=True))"
    return subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)


# What an import leaves behind


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """The modules that `import torch` loads, and those that `import olq_fx` adds."""
    code = (
        "import json, sys, torch; before = set(sys.modules)\n"
        "import olq_fx\n"
        "print(json.dumps({'torch': sorted(before), 'added': sorted(set(sys.modules) - before)}))"
    )
    result: dict[str, list[str]] = json.loads(fresh(code))
    return result


@pytest.mark.parametrize(
    "heavy",
    [
        "triton",
        "torchao",
        "transformers",
        "torch._inductor",
        "torch._dynamo",
        "rich",
        "regex",
        "yaml",
        "click",
        "matplotlib",
        "olq_fx.comparison",
    ],
)
def test_import_loads_nothing_heavy(loaded: dict[str, list[str]], heavy: str):
    assert [m for m in loaded["added"] if m == heavy or m.startswith(f"{heavy}.")] == []


def test_import_loads_no_other_package(loaded: dict[str, list[str]]):
    """Counted and not timed, so that a slow machine cannot fail it; benchmarks/import_time.py has the times."""
    packages = {m.partition(".")[0] for m in loaded["added"]} - set(sys.stdlib_module_names)
    assert {"olq_fx"} <= packages <= {"olq_fx", "einops"}


def test_import_adds_few_modules(loaded: dict[str, list[str]]):
    foreign = [m for m in loaded["added"] if not m.startswith("olq_fx")]
    assert len(foreign) <= 40, foreign


SETTINGS = """
import json, logging, os, random, sys, warnings
import torch, torch._dynamo.config, torch._functorch.config, torch._inductor.config

def written(value):  # equal sets may list their members in different orders
    return repr(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)

def snapshot():
    configs = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
    return {
        **{c.__name__: [(k, written(v)) for k, v in sorted(c.get_config_copy().items())] for c in configs},
        "environment": dict(os.environ),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "precision": [str(torch.get_default_dtype()), torch.get_float32_matmul_precision()],
        "determinism": [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark],
        "autograd": torch.is_grad_enabled(),
        "random": [hash(random.getstate()), torch.initial_seed(), torch.random.get_rng_state().sum().item()],
        "warnings": repr(warnings.filters),
        "handlers": repr(logging.getLogger().handlers),
        "path": sys.path,
        "cuda": torch.cuda.is_initialized(),
    }

{first}
before = snapshot()
import olq_fx
{use}
after = snapshot()
print(json.dumps([key for key in before if before[key] != after[key]]))
"""

PLAIN = """
with torch.random.fork_rng():
    (plain, one, other), x = (torch.nn.Linear(32, 32) for _ in range(3)), torch.randn(4, 32)
torch.compile(lambda x: plain(x).relu())(x)  # what Inductor sets when it builds a kernel is not ours
"""

BOTH = """
torch.compile(one, backend=olq_fx.backend("mxfp8"))(x)
olq_fx.quantize_(other, "int8")
"""


@pytest.mark.parametrize(
    ("first", "use"),
    # The known failure 37 holds the latter by default.
    [pytest.param("", "", id="import"), pytest.param(PLAIN, BOTH, id="both routes", marks=pytest.mark.slow)],
)
def test_no_setting_changes(first: str, use: str):
    assert json.loads(fresh(SETTINGS.replace("{first}", first).replace("{use}", use))) == []


# Who imports whom


def test_floors_are_kept():
    done = lint_contracts(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("olq_fx/errors.py", "import olq_fx.quantize"),
        ("kernels/reference.py", "import olq_fx.passes"),
        ("olq_fx/formats.py", "import torch"),
        ("olq_fx/weights.py", "import triton"),
        ("olq_fx/upstairs.py", ""),
    ],
    ids=["lower floor", "kernels know no passes", "no torch in tables", "no triton", "module on no floor"],
)
def test_contracts_catch(tmp_path: Path, file: str, line: str):
    """Each contract fails on what it forbids."""
    for folder in ("olq_fx", "passes", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / file).open("a") as source:
        source.write(f"\n{line}\n")
    assert lint_contracts(tmp_path).returncode != 0


def imports(tree: ast.Module) -> Iterator[str]:
    """The full dotted name of everything that is imported, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.Module) -> Iterator[str]:
    """Every dotted access that starts at the name `torch`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith("torch.") and dotted != "torch._C":
                yield dotted


def is_private(dotted: str) -> bool:
    """Whether a part of a torch name is private; operators (`torch.ops.aten._x`) are no Python API."""
    if dotted in SUBCLASS_PROTOCOL or not dotted.startswith("torch.") or dotted.startswith("torch.ops."):
        return False
    return "._" in dotted.replace("__", "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_torch_api_stays_in_one_file(path: Path):
    tree = ast.parse(path.read_text())
    private = sorted({name for name in (*imports(tree), *attributes(tree)) if is_private(name)})
    # The adapter is two files, of which one is loaded with Inductor only. The testing kit's substitute for a GPU is put
    # into the private parts themselves; nothing at run time uses it.
    assert bool(private) == (path.name in ("torch_private.py", "torch_templates.py", "testing_gpu.py")), private


def above_the_passes() -> set[str]:
    """The modules on the floors above the passes, as the contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [floors] = [contract["layers"] for contract in contracts if contract["name"] == "Floors"]
    return set(re.findall(r"\w+", " ".join(floors[: floors.index("passes")])))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_passes_and_what_stands_on_them_know_fx(path: Path):
    known = [name for name in imports(ast.parse(path.read_text())) if name.startswith("torch.fx")]
    assert path.parent.name == "passes" or path.stem in above_the_passes() | {"torch_private"} or not known, known


PASS_MODULES = [factory.__module__ for factory in pipeline.PASSES]


@pytest.mark.parametrize("module", PASS_MODULES)
def test_a_pass_knows_no_other_pass(module: str):
    """But for `annotate`, which writes the labels that later passes read."""
    path = ROOT / "passes" / f"{module.rpartition('.')[2]}.py"
    others = set(PASS_MODULES) - {module, "olq_fx.passes.annotate"}
    known = [
        name for name in imports(ast.parse(path.read_text())) if name in others or name.rpartition(".")[0] in others
    ]
    assert not known
