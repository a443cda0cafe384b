"""What other libraries are given of olq_fx through the places where they register such things.

    olq_fx.integrations.transformers      a configuration for `from_pretrained`, an implementation of experts
    olq_fx.integrations.diffusers         a configuration for `from_pretrained` of models and pipelines
    olq_fx.integrations.accelerate        sizes for device maps

Behind them are `transformers_*`, and `hub_config`, `hub_models` and `stored`, which transformers and diffusers share.
PEFT needs nothing: `olq_fx.weights_inplace` says how its adapters are merged.
"""
