"""What other libraries are given of olq_fx through the places where they register such things.

olq_fx.integrations.transformers      an implementation of experts
"""
