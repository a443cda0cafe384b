"""Operators of olq_fx, their reference implementations and kernels."""
