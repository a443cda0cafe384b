"""The operators of olq_fx and what runs them.

- `ops`: the operators `torch.ops.olq_fx.*`, their shapes, gradients and decompositions.
- `reference`: their definition in pure PyTorch, for any device.
- `native`: C++ kernels for CPUs, built by the machine's own compiler at first use, bit-equal to the reference.
- `registry`: which of them runs a layer, with the reason.
"""
