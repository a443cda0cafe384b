"""What transformers 5 is given: a configuration for `from_pretrained`, and an implementation of experts.

    from olq_fx.integrations.transformers import OlqFxConfig, use_experts

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=OlqFxConfig("fp8_per_block"))
    model.hf_quantizer.report
    use_experts(model)                  a layer of quantized experts as one operator
    model.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)

Importing this module tells transformers of the method `olq_fx`; it finds no such module by itself, so that this import
stands before the loading of what was saved, too.
"""

from olq_fx.integrations.transformers_config import OlqFxConfig
from olq_fx.integrations.transformers_experts import NAME, experts_forward, refusal, register, use_experts
from olq_fx.integrations.transformers_quantizer import OlqFxHfQuantizer, register_quantization

register_quantization()

__all__ = [
    "NAME",
    "OlqFxConfig",
    "OlqFxHfQuantizer",
    "experts_forward",
    "refusal",
    "register",
    "register_quantization",
    "use_experts",
]
