"""Which weight formats go with which activation formats: what a configuration accepts, pair by pair.

pairs() -> tuple[FormatPair, ...]
"""

import dataclasses

from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import OlqFxError
from olq_fx.formats import FORMATS


@dataclasses.dataclass(frozen=True, slots=True)
class FormatPair:
    """A weight format with an activation format (None: original precision), and why it is refused, or ""."""

    weight: str
    activation: str | None
    refused: str


def pairs() -> tuple[FormatPair, ...]:
    """Every weight format with every activation format and with none, in the order of `FORMATS`."""
    weights = [format.name for format in FORMATS.values() if format.weight]
    activations = [format.name for format in FORMATS.values() if format.activation]
    return tuple(
        FormatPair(weight, activation, _refused(weight, activation))
        for weight in weights
        for activation in (*activations, None)
    )


def _refused(weight: str, activation: str | None) -> str:
    try:
        QuantizationConfig.parse({"linear": {"weight": weight, "activation": activation}})
    except OlqFxError as error:
        return str(error)
    return ""
