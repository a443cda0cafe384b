"""What the configurations for transformers and diffusers have in common: each wraps a `QuantizationConfig`."""

import enum
from collections.abc import Mapping
from typing import Any

from olq_fx.configuration import QuantizationConfig
from olq_fx.configuration_values import INHERIT
from olq_fx.errors import ConfigurationTypeError


class QuantMethod(str, enum.Enum):
    """What the libraries know this one by; diffusers reads `.value`."""

    OLQ_FX = "olq_fx"


class HubConfig:
    """A configuration in the form in which `config.json` holds it.

    Attributes:
        quant_method: the name of the method.
        config: what is asked for.
        strict: whether a pattern that matches nothing is an error, or a warning.
    """

    quant_method: Any
    config: QuantizationConfig
    strict: bool

    def __init__(self, config: object = INHERIT, strict: bool = True, **keys: object) -> None:
        """Take whatever `olq_fx.quantize_` takes.

        Args:
            config: a scheme name, dictionary, JSON text, path of a file, or QuantizationConfig.
            strict: whether a pattern that matches nothing is an error, or a warning.
            **keys: keys of the configuration.

        Raises:
            ConfigurationError, ConfigurationTypeError: see `olq_fx.QuantizationConfig.parse`.
        """
        if not isinstance(strict, bool):
            raise ConfigurationTypeError(f"strict is a bool, not {type(strict).__name__}")
        self.quant_method = QuantMethod.OLQ_FX
        self.config = QuantizationConfig.parse(config, **keys)
        self.strict = strict

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the method, the keys of the configuration, and `strict` where it is off."""
        strict = {} if self.strict else {"strict": False}
        return {"quant_method": self.quant_method.value, **strict, **self.config.to_dict()}

    def to_diff_dict(self) -> dict[str, Any]:
        """What is not the default, for the libraries' JSON: all of `to_dict`."""
        return self.to_dict()

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The inverse of `to_dict`.

        Args:
            config_dict: the dictionary.
            return_unused_kwargs: return `kwargs` too, none of which is used.
            **kwargs: of the library's other methods; ignored.
        """
        keys = {key: value for key, value in config_dict.items() if key not in ("quant_method", "strict")}
        found = cls(keys, strict=config_dict.get("strict", True))
        return (found, kwargs) if return_unused_kwargs else found

    def __eq__(self, other: object) -> bool:
        """Whether both ask for the same."""
        if not isinstance(other, HubConfig):
            return NotImplemented
        return (type(self), self.config, self.strict) == (type(other), other.config, other.strict)

    def __hash__(self) -> int:
        """Of what is asked for."""
        return hash((type(self), self.config, self.strict))


class TrainableQuantizer:
    """What both libraries ask of a quantizer, and that has one answer."""

    @property
    def is_trainable(self) -> bool:
        """Adapters on it are; converted weights are frozen."""
        return True

    @property
    def is_compileable(self) -> bool:
        """It is."""
        return True
