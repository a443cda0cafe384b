"""What measured choices depend on besides the GPU: the version of triton and the text of the kernels. Imports neither.

API:
    FAMILIES                        the kernels whose blocking is chosen, by name
    source_hash(family) -> str      of every file that a kernel of the family is made of
    triton_minor() -> str           `3.7`, or "" where triton is not installed
"""

import functools
import hashlib
import importlib.metadata
import re
from pathlib import Path
from types import MappingProxyType
from typing import Literal

Family = Literal["product", "chain", "grouped"]

FAMILIES: MappingProxyType[Family, tuple[str, ...]] = MappingProxyType(
    {
        "product": ("triton_matmul", "triton_gemv", "triton_persistent"),
        "chain": ("triton_chain",),
        "grouped": ("triton_grouped", "triton_routing"),
    }
)
"""By name, the modules with the kernels that are launched; what those import belongs to them."""

_FOLDER = Path(__file__).parent
_IMPORT = re.compile(r"^from olq_fx\.kernels\.(\w+) import", re.MULTILINE)


@functools.cache
def source_hash(family: Family) -> str:
    """16 digits that change with any change of the kernel of a family or of a device function that it may call."""
    texts = sources(family)
    whole = "\0".join(f"{module}\0{texts[module]}" for module in sorted(texts))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def sources(family: Family) -> dict[str, str]:
    """The text of every module that a kernel of the family is made of, by its name."""
    texts: dict[str, str] = {}
    left = list(FAMILIES[family])
    while left:
        module = left.pop()
        if module not in texts:
            texts[module] = (_FOLDER / f"{module}.py").read_text(encoding="utf-8")
            left += _IMPORT.findall(texts[module])
    return texts


@functools.cache
def triton_minor() -> str:
    """The first two numbers of triton's version, from which machine code differs; "" where it is not installed."""
    for name in ("triton", "triton-nightly"):
        try:
            return ".".join(importlib.metadata.version(name).split(".")[:2])
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
