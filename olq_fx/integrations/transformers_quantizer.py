"""What transformers calls while it loads a model: plan on meta, convert each weight as it comes, save and load back.

transformers builds a model on meta, asks the quantizer to prepare it, and then reads tensor after tensor from mapped
files. `_process_model_before_weight_loading` makes the planned weights pending; for each of them an operation gets the
values (renamed and merged as the model wants them) and converts them. A saved model says in its files what is quantized
(`olq_fx.stored_weights`), and another operation takes the parts of each weight as they are, mapped.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer

from olq_fx import conversion
from olq_fx import stored_weights as stored
from olq_fx.integrations.hub_config import QuantMethod, TrainableQuantizer
from olq_fx.integrations.hub_models import (
    Planned,
    largest_weight,
    refuse_offloading,
    report_of_stored,
    single_device,
    tied,
    weight_at,
)
from olq_fx.integrations.transformers_config import OlqFxConfig
from olq_fx.integrations.transformers_operations import Faults, FillWeight, parts_converter, streamed
from olq_fx.plan import plan_for
from olq_fx.quantize import finalize
from olq_fx.report import Report
from olq_fx.weights import QuantizedWeight


class OlqFxHfQuantizer(TrainableQuantizer, HfQuantizer):
    """Quantizes a model of transformers while it is loaded; `model.hf_quantizer`.

    Attributes:
        report: what was done with every weight.
        stored: of a model that was saved, its converted weights by their paths.
        faults: what was wrong with values.
    """

    requires_calibration = False
    quantization_config: OlqFxConfig

    def __init__(self, quantization_config: OlqFxConfig, **kwargs: Any) -> None:
        """Made by transformers."""
        super().__init__(quantization_config, **kwargs)
        self.report: Report | None = None
        self.stored: dict[str, stored.StoredWeight] = {}
        self.faults = Faults()
        self._planned: Planned | None = None
        self._largest = 0

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse to offload.

        Raises:
            ConfigurationError: the device map puts modules on disk, or on the CPU beside other devices.
        """
        refuse_offloading(device_map)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, device_map: Any = None, **kwargs: Any
    ) -> Any:
        """Make the planned weights, or those that were saved, pending."""
        config = self.quantization_config
        if self.pre_quantized:
            found = stored.read(checkpoint_files or [])
            stored.install(model, found)
            self.stored = {weight.names[0]: weight for weight in found}
            self.report = report_of_stored(config.config, model)
            return model
        with tied(model, model.all_tied_weights_keys):
            plan = plan_for(config.config, model, strict=config.strict, device=single_device(device_map))
            conversion.preflight(model, plan.rows)
            self.report = Report(plan)
            conversion.execute(model, plan, self.report)
        self._largest = largest_weight(plan)
        self._planned = Planned(model, plan)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Convert what came another way, and give weights that no file had what transformers would give them.

        Raises:
            ConversionError: values cannot be converted, or parts do not fit.
            PendingWeightError: a weight that was saved lacks parts.
        """
        self.faults.check()
        if self._planned is not None:
            assert self.report is not None
            self._planned.complete(model, self.report, model.initialize_weights)
            self._planned = None  # it refers to the model
        finalize(model)
        model._weight_conversions = []  # what is saved has the names of the model
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor is for a planned weight."""
        return param_name not in self.faults.unfit and weight_at(model, param_name) is not None

    def get_quantize_ops(self) -> FillWeight:
        """What converts the values of a weight."""
        return FillWeight(self.faults)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """How names in the files become names of the model; what was saved has those of the model."""
        if not self.pre_quantized:
            return [streamed(conversion, self.faults) for conversion in weight_conversions]
        return [parts_converter(self.stored, self.faults, self)]

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes of a value: `device_map="auto"` counts what the model will take."""
        if isinstance(param, QuantizedWeight):
            return param.stored_bytes / max(1, param.numel())
        return param.element_size()

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Keep room on each accelerator for the one weight that is being converted."""
        return {
            device: size if device in ("cpu", "disk") else max(0, size - self._largest)
            for device, size in max_memory.items()
        }

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What `save_pretrained` writes."""
        return stored.parts_of(model), stored.describe(model)

    def is_serializable(self) -> bool:
        """It is."""
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        conversion.dequantize_(model)
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # a saved configuration has names
        return model if wanted in (None, model.dtype) else model.to(wanted)


def register_quantization() -> None:
    """Tell transformers of the method; a second time changes nothing."""
    name = QuantMethod.OLQ_FX.value
    if name not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(name)(OlqFxConfig)
    if name not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(name)(OlqFxHfQuantizer)
