"""Quantization of activations in what make_fx records (torch.compile, torch.export): written out in aten, once.

Inductor fuses it with the producer of the input, and layers that read one input (q, k and v) share it. Where passes of
ours will see what is recorded, it stays one operator until they have.

    quantized_once(x, activation, rule, recording) -> Parts
    operators_kept()                                             a context for the latter
"""

import contextlib
import contextvars
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from olq_fx import numerics, torch_private
from olq_fx.formats import get_format
from olq_fx.numerics import Parts

_QUANTIZED: "weakref.WeakKeyDictionary[Any, dict[tuple[Any, str, str], Parts]]" = weakref.WeakKeyDictionary()
"""For each recording: (what was quantized, format, rule) -> its parts."""


_KEPT: contextvars.ContextVar[bool] = contextvars.ContextVar("olq_fx_operators_kept", default=False)


@contextlib.contextmanager
def operators_kept() -> Iterator[None]:
    """Within it, a quantization is recorded as the operator: who opens it decomposes what is left of them."""
    token = _KEPT.set(True)
    try:
        yield
    finally:
        _KEPT.reset(token)


def quantized_once(x: Tensor, activation: str, rule: str, recording: Any) -> Parts:
    """The parts of `x`, recorded once for all products that read the same value in the same format."""
    value = torch_private.recorded_value(x, recording)
    if value is None:
        return _quantize(x, activation, rule)
    known = _QUANTIZED.setdefault(recording, {})
    key = (value, activation, rule)
    if key not in known:
        known[key] = _quantize(x, activation, rule)
    return known[key]


def _quantize(x: Tensor, activation: str, rule: str) -> Parts:
    if _KEPT.get():
        return tuple(torch.ops.olq_fx.quantize.default(x, activation, rule))
    return numerics.quantize(x, get_format(activation), rule)
