"""Compile the native kernels with the machine's own C++ compiler, once, into a per-user cache.

The file's name is a hash of everything that decides its contents: the sources, the flags, the compiler's version and
the features of the CPU (the code is made for exactly this one; a home directory may be shared by several). It is
written under another name and renamed, so that processes that build at the same time do not meet, and a killed one
leaves no half file. Nothing here raises: `Built.reason` says why there is no library.
"""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("native_encode.cpp", "native_product.cpp", "native_few.cpp", "native_integer.cpp")
HEADERS = (
    "native_simd.h",
    "native_format.h",
    "native_elements.h",
    "native_codes.h",
    "native_decode.h",
    "native_wide.h",
    "native_io.h",
    "native_few.h",
    "native_integer.h",
)

COMPILERS = ("g++", "clang++", "c++")
"""What is looked for where the environment variable CXX does not name a compiler."""

_COMMON = ("-std=c++17", "-O2", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-Wno-unknown-pragmas")
# Contraction would change codes and scales; in sums of products it is wanted (it turns them into fused multiply-adds).
_CONTRACTION = {
    "native_encode.cpp": "off",
    "native_product.cpp": "fast",
    "native_few.cpp": "fast",
    "native_integer.cpp": "off",
}
# From best to plainest: some compilers have no OpenMP, and name the machine's own architecture otherwise.
_VARIANTS = (
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled library, or why there is none.

    Attributes:
        path: the file to load; None if there is none.
        reason: why; "" if there is one.
    """

    path: Path | None
    reason: str


class _CompilationError(Exception):
    """The compiler failed; the message is the end of what it said."""


def build(*, again: bool = False) -> Built:
    """The library for this machine, from the cache or compiled now.

    Args:
        again: compile even if the cache has it (it could not be loaded).
    """
    if sys.platform not in ("linux", "darwin"):
        return Built(None, f"the native kernels are built on Linux and macOS, not on {sys.platform}")
    compiler = _compiler()
    if not compiler:
        return Built(None, f"no C++ compiler: CXX is not set and none of {', '.join(COMPILERS)} is on the PATH")
    try:
        return _cached(compiler, again)
    except (OSError, subprocess.SubprocessError, _CompilationError) as error:
        return Built(None, f"{shlex.join(compiler)} cannot build the native kernels: {error}")


def _compiler() -> list[str]:
    named = os.environ.get("CXX", "").strip()
    if named:
        return shlex.split(named)
    found = (shutil.which(name) for name in COMPILERS)
    return next(([path] for path in found if path), [])


def _cached(compiler: Sequence[str], again: bool) -> Built:
    name = f"native-{_key(compiler, _output([*compiler, '--version']))}.so"
    for folder in () if again else _folders():
        if (folder / name).is_file() and _trusted(folder):
            return Built(folder / name, "")
    for folder in _folders():
        path = folder / name
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Only this much may fail for want of a writable folder; what the compiler says must be heard.
            scratch = Path(tempfile.mkdtemp(dir=folder))
            try:
                os.replace(_compile(compiler, scratch), path)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            if _trusted(folder):
                return Built(path, "")
    return Built(None, "there is no folder to keep the native kernels in")


def _key(compiler: Sequence[str], version: str) -> str:
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for name in (*SOURCES, *HEADERS, Path(__file__).name):
        digest.update((here / name).read_bytes())
    digest.update("\0".join([*compiler, version, platform.machine(), _cpu_features()]).encode())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """What the CPU can do, as far as the system says."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        wanted = ("flags", "Features", "model name", "CPU part")
        kept = {line.strip() for line in lines if line.startswith(wanted)}
        return "\n".join(sorted(kept))
    return platform.processor()


def _folders() -> Iterator[Path]:
    """Where to look for the library and where to put it, best first."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    yield Path(home) / "olq_fx"
    shared = Path(tempfile.gettempdir())
    yield shared / f"olq_fx-{_user()}"
    # Somebody else made that one, or it is a file: one for this process alone.
    with contextlib.suppress(OSError):
        yield Path(tempfile.mkdtemp(prefix="olq_fx-", dir=shared))


def _trusted(folder: Path) -> bool:
    """Whether only this user, or the system's administrator, can have put a file there: code is loaded from it."""
    found = folder.stat()
    return found.st_uid in (_user(), 0) and not found.st_mode & 0o022


def _user() -> int:
    return getattr(os, "getuid", lambda: 0)()


def _compile(compiler: Sequence[str], scratch: Path) -> Path:
    """Compile in `scratch` with the first variant of flags that the compiler takes."""
    errors: list[str] = []
    for variant in _VARIANTS:
        try:
            return _compile_with(compiler, variant, scratch)
        except _CompilationError as error:
            errors.append(str(error))
    raise _CompilationError(errors[0])


def _compile_with(compiler: Sequence[str], variant: Sequence[str], scratch: Path) -> Path:
    here, library = Path(__file__).parent, scratch / "native.so"
    commands = [
        [
            *(*compiler, *_COMMON, *variant, f"-ffp-contract={_CONTRACTION[source]}"),
            *("-c", str(here / source), "-o", str(scratch / f"{source}.o")),
        ]
        for source in SOURCES
    ]
    _run_together(commands)
    objects = [str(scratch / f"{source}.o") for source in SOURCES]
    _run_together([[*compiler, "-shared", *variant, *objects, "-o", str(library)]])
    return library


def _run_together(commands: Sequence[Sequence[str]]) -> None:
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    said = []
    try:
        for process in running:
            said.append(process.communicate(timeout=_SECONDS)[0])
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, output in zip(running, said, strict=True):
        if process.returncode:
            raise _CompilationError(output.strip()[-800:] or f"it ended with status {process.returncode}")


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise _CompilationError(f"{shlex.join(command)} ended with status {done.returncode}")
    return done.stdout
