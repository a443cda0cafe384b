"""Hypothesis strategies over all that the library accepts; hypothesis itself is needed only where one is used."""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from olq_fx.formats import FORMATS, Format
from olq_fx.schemes import SCHEMES
from olq_fx.testing_models import MODELS, ModelCase, model_case

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes in which weights and activations arrive."""

ROW_KINDS = ("normal", "zero", "outlier", "tiny", "subnormal", "extreme", "constant", "power_of_two", "mixed")
"""What a row of a drawn tensor may be like."""

LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded")
"""How a drawn tensor may lie in memory."""


def _strategies(caller: str) -> types.ModuleType:
    try:
        from hypothesis import strategies
    except ImportError as error:
        raise ImportError(
            f"olq_fx.testing.{caller}() makes a Hypothesis strategy and needs the package: pip install hypothesis"
        ) from error
    return strategies


def tensors(
    *,
    rows: tuple[int, int] = (0, 9),
    columns: tuple[int, int] = (1, 150),
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    kinds: Sequence[str] = ROW_KINDS,
    layouts: Sequence[str] = LAYOUTS,
    nonfinite: bool = False,
) -> "SearchStrategy[Tensor]":
    """Tensors (R, K) whose rows are each of one kind: ordinary, zero, with outliers, subnormal, extreme, ...

    Args:
        rows: least and greatest R.
        columns: least and greatest K.
        dtypes: to choose from.
        kinds: to choose from for each row, of `ROW_KINDS`.
        layouts: to choose from, of `LAYOUTS`; values of an `expanded` tensor repeat its first row.
        nonfinite: whether some elements are NaN or infinite.
    """
    st = _strategies("tensors")

    @st.composite  # type: ignore[untyped-decorator]
    def build(draw: "DrawFn") -> Tensor:
        height, width = draw(st.integers(*rows)), draw(st.integers(*columns))
        dtype = draw(st.sampled_from(list(dtypes)))
        chosen = draw(st.lists(st.sampled_from(list(kinds)), min_size=height, max_size=height))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
        made = [_row(kind, width, dtype, generator) for kind in chosen]
        values = torch.stack(made) if made else torch.empty(0, width, dtype=dtype)
        if nonfinite and values.numel():
            places = st.tuples(st.integers(0, height - 1), st.integers(0, width - 1))
            for place in draw(st.lists(places, min_size=1, max_size=4)):
                values[place] = draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
        return laid_out(values, draw(st.sampled_from(list(layouts))))

    return build()  # type: ignore[no-any-return]


def _row(kind: str, width: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """One row (width,) of a kind. Everything is made in float64 and clamped to the finite values of `dtype`."""
    about = torch.finfo(dtype)
    normal = torch.randn(width, dtype=torch.float64, generator=generator)
    pick = int(torch.randint(width, (), generator=generator))
    sign = torch.where(normal < 0, -1.0, 1.0)
    if kind == "zero":
        normal = normal * 0
    elif kind == "outlier":
        normal[pick] = normal[pick] * 1000
    elif kind == "tiny":
        normal = normal * 1e-7
    elif kind == "subnormal":
        steps = torch.randint(-8, 9, (width,), generator=generator)
        normal = steps * about.smallest_normal * about.eps
    elif kind == "extreme":
        normal = sign * about.max * torch.rand(width, dtype=torch.float64, generator=generator)
        normal[pick] = about.max
    elif kind == "constant":
        normal = torch.full_like(normal, float(normal[pick]))
    elif kind == "power_of_two":
        normal = sign * torch.exp2(torch.randint(-9, 10, (width,), generator=generator).double())
    elif kind == "mixed":
        normal = normal * torch.exp2(torch.randint(-20, 12, (width,), generator=generator).double())
    elif kind != "normal":
        raise ValueError(f"unknown kind of row {kind!r}; valid: {', '.join(ROW_KINDS)}")
    return normal.clamp(about.min, about.max).to(dtype)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout (`expanded`: the first row for every row).

    Args:
        values: (R, K).
        layout: one of `LAYOUTS`.

    Returns:
        (R, K), equal to `values` (but for `expanded`).
    """
    height, width = values.shape
    if layout == "transposed":
        return values.T.contiguous().T
    if layout == "strided":
        wide = values.new_zeros(height * 2, width * 3)
        wide[::2, ::3] = values
        return wide[::2, ::3]
    if layout == "offset":
        line = values.new_zeros(values.numel() + 3)
        line[3:] = values.reshape(-1)
        return line[3:].view(height, width)
    if layout == "expanded" and height:
        return values[:1].expand(height, width)
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; valid: {', '.join(LAYOUTS)}")
    return values.contiguous()


@dataclasses.dataclass(frozen=True, slots=True)
class FormatRule:
    """A format together with one of its scale rules."""

    format: Format
    rule: str


def formats(use: Literal["weight", "activation"] | None = None) -> "SearchStrategy[FormatRule]":
    """A format and one of the rules that it knows; `use` keeps those that may be a weight or an activation."""
    st = _strategies("formats")
    chosen = [
        FormatRule(fmt, rule)
        for fmt in FORMATS.values()
        if use is None or (fmt.weight if use == "weight" else fmt.activation)
        for rule in fmt.rules
    ]
    return st.sampled_from(chosen)  # type: ignore[no-any-return]


def schemes() -> "SearchStrategy[str]":
    """The name of a scheme."""
    return _strategies("schemes").sampled_from(list(SCHEMES))  # type: ignore[no-any-return]


def configurations(paths: Sequence[str] = ()) -> "SearchStrategy[str | dict[str, Any]]":
    """A valid configuration: a scheme's name, or a dictionary with slots, `ignore` or `targets`.

    Args:
        paths: module paths of a model whose layers are quantized by default; patterns are made of them, at least one is
            never ignored, and without any there are no patterns.
    """
    st = _strategies("configurations")
    slot = _slots(st)

    @st.composite  # type: ignore[untyped-decorator]
    def build(draw: "DrawFn") -> "str | dict[str, Any]":
        shape = draw(st.sampled_from(["name", "slots", "ignore", "targets"] if paths else ["name", "slots"]))
        scheme: str = draw(schemes())
        if shape == "name":
            return draw(st.sampled_from([scheme, scheme.upper(), scheme.replace("_", "-")]))  # type: ignore[no-any-return]
        if shape == "slots":
            return {"quantization": scheme, "linear": draw(slot)}
        some = draw(st.lists(st.sampled_from(list(paths)), min_size=1, unique=True, max_size=max(1, len(paths) - 1)))
        if shape == "ignore":
            return {"quantization": scheme, "ignore": [draw(_patterns(st, path)) for path in some if len(paths) > 1]}
        return {"targets": {path: draw(slot) for path in some}}

    return build()  # type: ignore[no-any-return]


def _slots(st: types.ModuleType) -> Any:
    """A slot as a user may write it: a scheme, a weight format, or a dictionary of weight and activation."""
    weights = [fmt.name for fmt in FORMATS.values() if fmt.weight]
    activations = [fmt.name for fmt in FORMATS.values() if fmt.activation]
    pair: Mapping[str, Any] = {
        "weight": st.sampled_from(weights),
        "activation": st.sampled_from([*activations, None]),
    }
    return st.one_of(schemes(), st.sampled_from(weights), st.fixed_dictionaries(pair))


def _patterns(st: types.ModuleType, path: str) -> Any:
    """A pattern that matches `path` and nothing else: itself, its weight, or a regular expression."""
    return st.sampled_from([path, f"re:{path.replace('.', '[.]')}$"])


def models(
    names: Sequence[str] = tuple(MODELS), dtypes: Sequence[torch.dtype] = FLOAT_DTYPES
) -> "SearchStrategy[ModelCase]":
    """A small model with random weights and inputs that fit.

    Args:
        names: keys of `MODELS` to choose from.
        dtypes: to choose from.
    """
    st = _strategies("models")
    return st.builds(  # type: ignore[no-any-return]
        model_case, st.sampled_from(list(names)), st.sampled_from(list(dtypes)), st.integers(0, 2**16)
    )
