"""The configuration that `from_pretrained` of transformers takes."""

from transformers.utils.quantization_config import QuantizationConfigMixin

from olq_fx.integrations.hub_config import HubConfig


class OlqFxConfig(HubConfig, QuantizationConfigMixin):
    """Quantize a model of transformers while it is loaded; takes whatever `olq_fx.quantize_` takes.

    >>> OlqFxConfig("fp8_per_block", ignore=["lm_head"]).to_dict()
    {'quant_method': 'olq_fx', 'quantization': 'fp8_per_block', 'ignore': ['lm_head']}
    """
