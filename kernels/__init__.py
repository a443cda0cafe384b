"""The operators of olq_fx and what runs them.

- `ops`: the operators `torch.ops.olq_fx.*`, their shapes, gradients and decompositions.
- `reference`: their definition in pure PyTorch, for any device.
- `native`: C++ kernels for CPUs, bit-equal to the reference: `native_encode.cpp` makes codes and scales,
  `native_product.cpp` multiplies; `native_format.h`, `native_decode.h`, `native_simd.h` are what both are made of.
- `build`: builds them with the machine's own compiler at first use.
- `registry`: which of them runs a layer, with the reason.
"""
