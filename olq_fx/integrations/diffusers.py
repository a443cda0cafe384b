"""What diffusers is given: a configuration for `from_pretrained` of models and, component by component, of pipelines.

    from olq_fx.integrations.diffusers import OlqFxConfig

    DiTTransformer2DModel.from_pretrained(path, quantization_config=OlqFxConfig("fp8_per_block"))
    PipelineQuantizationConfig(quant_mapping={"transformer": OlqFxConfig("mxfp4")})
    PipelineQuantizationConfig(quant_backend="olq_fx", quant_kwargs={"config": "int8"}, components_to_quantize=...)

Importing this module tells diffusers, and transformers if it is there, of the method `olq_fx`; the import stands before
the loading of what was saved, too.
"""

import importlib.util
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import Tensor, nn

from olq_fx import conversion
from olq_fx import stored_weights as stored
from olq_fx.errors import ConfigurationError
from olq_fx.integrations.accelerate import special_dtypes
from olq_fx.integrations.hub_config import HubConfig, QuantMethod, TrainableQuantizer
from olq_fx.integrations.hub_models import (
    convert_plain,
    device_of,
    largest_weight,
    refuse_offloading,
    report_of_stored,
    single_device,
    weight_at,
)
from olq_fx.plan import plan_for
from olq_fx.quantize import finalize
from olq_fx.report import Report
from olq_fx.weights import fill

__all__ = ["OlqFxConfig", "OlqFxDiffusersQuantizer", "register_quantization"]


class OlqFxConfig(HubConfig, QuantizationConfigMixin):
    """Quantize a model of diffusers while it is loaded; takes whatever `olq_fx.quantize_` takes.

    >>> OlqFxConfig("fp8_per_block", ignore=["proj_out"]).to_dict()
    {'quant_method': 'olq_fx', 'quantization': 'fp8_per_block', 'ignore': ['proj_out']}
    """


class OlqFxDiffusersQuantizer(TrainableQuantizer, DiffusersQuantizer):
    """Quantizes a model of diffusers while it is loaded; `model.hf_quantizer`.

    Attributes:
        report: what was done with every weight.
        stored: of a model that was saved, its converted weights by their paths.
    """

    requires_calibration = False
    use_keep_in_fp32_modules = True  # as without a quantizer
    quantization_config: OlqFxConfig

    def __init__(self, quantization_config: OlqFxConfig, **kwargs: Any) -> None:
        """Made by diffusers."""
        super().__init__(quantization_config, **kwargs)
        self.report: Report | None = None
        self.stored: dict[str, stored.StoredWeight] = {}
        self._model: weakref.ref[nn.Module] | None = None
        self._device_map: Any = None
        self._of_part: dict[str, str] = {}
        self._waiting: dict[str, dict[str, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and deepcopy see: the model itself, so that the copy belongs to the copy of the model."""
        return {**self.__dict__, "_model": None if self._model is None else self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The inverse of `__getstate__`."""
        model = state["_model"]
        self.__dict__.update(state, _model=None if model is None else weakref.ref(model))

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse to offload; called before and after the device map is made.

        Raises:
            ConfigurationError: the device map puts modules on disk, or on the CPU beside other devices.
        """
        refuse_offloading(device_map)
        self._device_map = device_map

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: Sequence[Any]) -> list[str]:
        """The names that the model expects: of the parts of a weight that of the weight."""
        if not self.pre_quantized:
            return loaded_keys
        found = stored.read([str(file) for file in checkpoint_files])
        self.stored = {weight.names[0]: weight for weight in found}
        self._of_part = {part: path for path, weight in self.stored.items() for part in weight.parts}
        ties = [name for weight in found for name in weight.names[1:]]
        return list(dict.fromkeys([*(self._of_part.get(key, key) for key in loaded_keys), *ties]))

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the parts of weights that were saved out of a file; those of one weight may lie in several files."""
        rest = {}
        model = None if self._model is None else self._model()
        for name, value in state_dict.items():
            path = self._of_part.get(name)
            if path is None or model is None:
                rest[name] = value
                continue
            weight, parts = self.stored[path], self._waiting.setdefault(path, {})
            parts[name] = value.to(device_of(self._device_map, path))
            if len(parts) == len(weight.parts):
                stored.take_parts(model, weight, self._waiting.pop(path))
        return rest

    def _process_model_before_weight_loading(self, model: Any, device_map: Any = None, **kwargs: Any) -> Any:
        """Make the planned weights, or those that were saved, pending."""
        config = self.quantization_config
        self._model = weakref.ref(model)
        if self.pre_quantized:
            stored.install(model, self.stored.values())
            self.report = report_of_stored(config.config, model)
            return model
        plan = plan_for(config.config, model, strict=config.strict, device=single_device(device_map))
        conversion.preflight(model, plan.rows)
        self.report = Report(plan)
        conversion.execute(model, plan, self.report)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """See that every planned weight is converted.

        Raises:
            PendingWeightError: no file had some of them.
        """
        assert self.report is not None
        finalize(model)
        for row in self.report.plan.rows:
            if row.decision == "quantize" and not self.pre_quantized:
                convert_plain(model, row)
                self.report.mark(row.path, "converted")
        return model

    def check_if_quantized_param(
        self, model: Any, param_value: Any, param_name: str, *args: Any, **kwargs: Any
    ) -> bool:
        """Whether a tensor is for a planned weight."""
        return weight_at(model, param_name) is not None

    def create_quantized_param(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the values of a weight: model, values, path and device are given."""
        model, values, path, device = args[:4]
        weight = weight_at(model, path)
        assert weight is not None
        fill(weight, values.to(device), values.dtype)

    def get_special_dtypes_update(self, model: Any, torch_dtype: torch.dtype) -> dict[str, Any]:
        """What `device_map="auto"` counts quantized weights as: bytes, or half bytes."""
        return special_dtypes(model)

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Keep room for scales, and on each accelerator for the one weight that is being converted."""
        assert self.report is not None
        largest = largest_weight(self.report.plan)
        return {
            device: size if device in ("cpu", "disk") else max(0, int(0.88 * _bytes(size)) - largest)
            for device, size in max_memory.items()
        }

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `save_pretrained` writes.

        Raises:
            ConfigurationError: it would be pickled; such files cannot say how they are quantized.
        """
        if not safe_serialization:
            raise ConfigurationError("safe_serialization=False: a quantized model is saved as safetensors only")
        model = None if self._model is None else self._model()
        assert model is not None
        return dict(stored.parts_of(model)), dict(stored.describe(model))

    @property
    def supports_parallel_loading(self) -> bool:
        """One tensor after the other, or there would be several in original precision."""
        return False

    @property
    def is_serializable(self) -> bool:
        """It is."""
        return True

    def _dequantize(self, model: Any) -> Any:
        conversion.dequantize_(model)
        kept = {key: value for key, value in model.config.items() if key != "quantization_config"}
        model._internal_dict = type(model.config)(kept)
        return model


def _bytes(size: Any) -> int:
    """A size as a number, also where it was written as "10GB"."""
    from accelerate.utils import convert_file_size_to_int

    return int(convert_file_size_to_int(size)) if isinstance(size, str) else int(size)


def register_quantization() -> None:
    """Tell diffusers, and transformers if it is installed, of the method; a second time changes nothing."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(QuantMethod.OLQ_FX.value, OlqFxConfig)
    AUTO_QUANTIZER_MAPPING.setdefault(QuantMethod.OLQ_FX.value, OlqFxDiffusersQuantizer)
    if importlib.util.find_spec("transformers") is not None:
        from olq_fx.integrations import transformers

        transformers.register_quantization()


register_quantization()
