"""The operators of olq_fx and what runs them.

- `ops`: the operators `torch.ops.olq_fx.*`, their shapes, gradients and decompositions.
- `reference`: their definition in pure PyTorch, for any device.
- `native`: C++ kernels for CPUs, bit-equal to the reference: `native_encode.cpp` makes codes and scales,
  `native_product.cpp` multiplies, `native_integer.cpp` multiplies int8 by int8. Their headers, lowest first:
  `native_simd.h` (eight floats), `native_format.h` (what a format is), `native_elements.h` (values to codes),
  `native_decode.h` (codes to values), `native_io.h` (activations in, outputs out), `native_integer.h`.
- `build`: builds them with the machine's own compiler at first use.
- `device`: the numerics as functions of Triton's language; `device_scales`: the scales by every rule, on top of it.
- `triton_encode`: Triton kernels that quantize and dequantize; `triton_quantize` launches them.
- `triton_matmul`: Triton kernels that multiply; `triton_product` chooses instruction and tiles, and launches them.
- `experts`: what a layer of experts computes, in pure PyTorch; `triton_experts` runs it.
- `triton_routing`: Triton kernels that sort tokens by expert and add what experts made of them; `triton_sorting`
  launches them.
- `triton_grouped`: Triton kernels that multiply the rows of each expert by its weight, and what is between two such.
- `triton_calls`: a launch of a Triton kernel as a value, to be run or to be compiled for a GPU that is not there.
- `registry`: which of them runs a layer, with the reason.
"""
