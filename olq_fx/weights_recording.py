"""Quantization of activations in what make_fx records (torch.compile, torch.export): written out in aten, once.

Inductor fuses it with the producer of the input, and layers that read one input (q, k and v) share it.
"""

import weakref
from typing import Any

from torch import Tensor

from olq_fx import numerics, torch_private
from olq_fx.formats import get_format
from olq_fx.numerics import Parts

_QUANTIZED: "weakref.WeakKeyDictionary[Any, dict[tuple[Any, str, str], Parts]]" = weakref.WeakKeyDictionary()
"""For each recording: (what was quantized, format, rule) -> its parts."""


def quantized_once(x: Tensor, activation: str, rule: str, recording: Any) -> Parts:
    """The parts of `x`, recorded once for all products that read the same value in the same format."""
    value = torch_private.recorded_value(x, recording)
    if value is None:
        return numerics.quantize(x, get_format(activation), rule)
    known = _QUANTIZED.setdefault(recording, {})
    key = (value, activation, rule)
    if key not in known:
        known[key] = numerics.quantize(x, get_format(activation), rule)
    return known[key]
