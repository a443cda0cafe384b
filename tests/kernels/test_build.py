"""Building the native kernels on machines that are not ready for it: never a crash, always a reason, equal codes."""

import json
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from olq_fx.kernels import build, native
from olq_fx.kernels.registry import KERNELS, KernelChoice, select

PROGRAM = textwrap.dedent(
    """
    import hashlib, json, warnings
    import torch
    from olq_fx.formats import FORMATS
    from olq_fx.kernels import native, ops, registry

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
        digest = hashlib.sha256()
        for name, fmt in FORMATS.items():
            for part in torch.ops.olq_fx.quantize(x, name, fmt.rules[0]):
                digest.update(part.view(torch.uint8).numpy().tobytes())
        weight = torch.ops.olq_fx.quantize(x, "mxfp4", "mse")
        y = torch.ops.olq_fx.linear(x, weight, "mxfp4", "mxfp4", "even", None, None)
        chosen = registry.select("linear", "mxfp4", "mxfp4", 20, 100, "cpu")
    print(json.dumps({
        "codes": digest.hexdigest(),
        "finite": bool(y.isfinite().all()),
        "kernel": chosen.name,
        "reason": chosen.reason,
        "warnings": [f"{w.category.__name__}: {w.message}" for w in said],
    }))
    """
)


def start(**environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> dict[str, object]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found: dict[str, object] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, object]:
    """What a process with the native kernels says."""
    found = finish(start())
    assert found["kernel"] == "native_cpu"
    assert found["reason"] == ""
    assert found["warnings"] == []
    return found


FALLBACKS = {
    "no such compiler": ({"CXX": "/nowhere/c++"}, "/nowhere/c++"),
    "a compiler that fails": (
        {"CXX": f"{sys.executable} -c 'import sys; sys.exit(\"--version\" not in sys.argv)'"},
        "cannot build",
    ),
    "no compiler at all": ({"CXX": "", "PATH": "/nowhere"}, "no C++ compiler"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_without_a_working_compiler_the_reference_runs(case: str, expected: dict[str, object], tmp_path: Path) -> None:
    environment, reason = FALLBACKS[case]
    found = finish(start(**environment, XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path)))
    assert found["kernel"] == "reference"
    assert reason in str(found["reason"])
    assert found["reason"] == f"native_cpu: {str(found['reason']).removeprefix('native_cpu: ')}"
    assert found["codes"] == expected["codes"]
    assert found["finite"]
    (said,) = found["warnings"]  # type: ignore[misc]
    assert said.startswith("OlqFxWarning: products and conversion run on the slow reference")


def test_switched_off_is_no_reason_to_warn(expected: dict[str, object]) -> None:
    found = finish(start(**{native.SWITCH: "0"}))
    assert found["kernel"] == "reference"
    assert found["reason"] == "native_cpu: switched off by OLQ_FX_NATIVE=0"
    assert found["codes"] == expected["codes"]
    assert found["warnings"] == []


def test_two_processes_may_build_at_once(expected: dict[str, object], tmp_path: Path) -> None:
    # Not optimized: quicker to build, and the bits must not depend on it.
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {shlex.join(build._compiler())} "$@" -O0\n')
    compiler.chmod(0o700)
    environment = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    pair = [start(**environment) for _ in range(2)]
    for process in pair:
        assert finish(process) == expected
    (library,) = (tmp_path / "olq_fx").iterdir()
    size = library.stat().st_size
    library.write_bytes(b"damaged")
    assert finish(start(**environment)) == expected
    assert library.stat().st_size == size, "a damaged library is built again"


@pytest.mark.parametrize("problem", ["a file in its place", "open to others"])
def test_a_cache_that_cannot_be_used_or_trusted_is_passed_over(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "made.so"
    library.write_bytes(b"code")

    def compiled(compiler: list[str], scratch: Path) -> Path:
        made = scratch / "native.so"
        made.write_bytes(b"code")
        return made

    monkeypatch.setattr(build, "_compile", compiled)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "home").mkdir()
    if problem == "open to others":
        (tmp_path / "home" / "olq_fx").mkdir()
        (tmp_path / "home" / "olq_fx").chmod(0o777)
    else:
        (tmp_path / "home" / "olq_fx").write_text("")
    built = build.build()
    assert built.reason == ""
    assert built.path is not None
    assert built.path.parent == tmp_path / f"olq_fx-{os.getuid()}"
    assert build.build() == built


def test_the_cached_file_depends_on_all_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    key = build._key(["g++"], "12.2")
    assert key == build._key(["g++"], "12.2")
    others = [build._key(["g++", "-g"], "12.2"), build._key(["g++"], "12.3")]
    monkeypatch.setattr(build, "_cpu_features", lambda: "sse2")
    others.append(build._key(["g++"], "12.2"))
    assert len({key, *others}) == 4


def test_flags_that_a_compiler_lacks_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without OpenMP (Apple's) still gives a library, of one thread."""
    tried: list[tuple[str, ...]] = []

    def compile_with(compiler: list[str], variant: tuple[str, ...], scratch: Path) -> Path:
        tried.append(variant)
        if "-fopenmp" in variant:
            raise build._CompilationError("unsupported option '-fopenmp'")
        return scratch / "native.so"

    monkeypatch.setattr(build, "_compile_with", compile_with)
    assert build._compile(["c++"], tmp_path) == tmp_path / "native.so"
    assert tried[-1] == ("-march=native",)


def test_a_library_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native._LOADER.get().library
    assert library is not None
    monkeypatch.setattr(native, "_Output", native._Parts)
    with pytest.raises(OSError, match="laid out"):
        native._declare(library)


def test_what_the_registry_says() -> None:
    assert select("linear", "mxfp4", None, 8, 8, "cpu") == KernelChoice("native_cpu", "")
    on_gpu = select("linear", "mxfp4", "mxfp4", 8, 8, "cuda")
    assert on_gpu == KernelChoice("triton", "")
    elsewhere = select("linear", "mxfp4", "mxfp4", 8, 8, "mps")
    assert elsewhere.reason == "native_cpu: runs on cpu, not on mps; triton: runs on cuda, not on mps"
    assert elsewhere.name == "reference"
    assert select("moe", "mxfp4", "mxfp4", 8, 8, "cpu").name == "reference"
    assert [kernel.name for kernel in KERNELS][-1] == "reference"


def test_a_user_who_asks_for_one_thread_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert native._threads(1 << 40) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert native._threads(1 << 40) == 7
    assert native._threads(100) == 1
