"""The operators of olq_fx and what runs them.

- `ops`: the operators `torch.ops.olq_fx.*`, their shapes, gradients and decompositions.
- `reference`: their definition in pure PyTorch, for any device.
- `native`: C++ kernels for CPUs, bit-equal to the reference: `native_encode.cpp` makes codes and scales,
  `native_product.cpp` multiplies, `native_few.cpp` few rows, `native_integer.cpp` int8 by int8. Their headers, lowest
  first: `native_simd.h` (eight floats), `native_format.h` (what a format is), `native_elements.h` (values to codes),
  `native_codes.h` (codes to numbers), `native_decode.h` (to values), `native_wide.h` (32 at a time), `native_io.h`
  (activations in, outputs out), `native_few.h`, `native_integer.h`.
  `native_experts` gives them the rows of many experts at once.
- `build`: builds them with the machine's own compiler at first use.
- `device`: the numerics as functions of Triton's language; `device_scales`: the scales by every rule, on top of it.
- `triton_encode`: Triton kernels that quantize and dequantize; `triton_quantize` launches them.
- `blocking`: how a product is cut into programs, as a value.
- `triton_operands`: tiles of quantized operands, loaded and decoded, as functions of Triton's language.
- `triton_matmul`: Triton kernels that multiply; `triton_gemv`: one row of activations, without a matrix instruction;
  `triton_persistent`: many rows, one tile after the other. `triton_product` chooses instruction, form and tiles, and
  launches them.
- `triton_chain`: a Triton kernel for linear -> chain -> quantization; `triton_linear_chain` launches it.
- `fused_quantize`: an operator for a quantization with what leads up to it; `template_lowering` makes one Triton kernel
  of it where Inductor compiles for a GPU, by the text in `template_sources`.
- `linear_products`: an operator for quantized layers on one input; `product_lowering` makes one Triton kernel of it, by
  the text in `product_sources`, where `product_forms` says that the operators of the layers would do no better.
  `template_operands` is what both lowerings know of operands.
- `on_load`: operators for formats whose groups are wider than a tile: a product takes maxima of what it makes, and the
  next quantizes what it loads; `device_maxima` has both as functions of Triton's language, `on_load_lowering` makes
  kernels of them, and `on_load_cost` says when that is cheaper than a quantization apart.
- `triton_ops`: the operators on a GPU's tensors, by these kernels.
- `producers`: what stands before a quantized layer, norms and activations, in pure PyTorch: a definition too.
- `device_producers`: the same as functions of Triton's language; `triton_producers`: kernels that compute and quantize
  them at once; `triton_fused` launches these.
- `experts`: what a layer of experts computes, in pure PyTorch; `expert_ops`: its operators; `expert_gate_ops`: that of
  the first product with what is before the second; `triton_expert_layer` runs a layer by Triton kernels.
- `triton_routing`: Triton kernels that sort tokens by expert and add what experts made of them; `triton_sorting`
  launches them.
- `triton_grouped`: Triton kernels that multiply the rows of each expert by its weight, and what is between two such;
  `triton_experts` launches them. `triton_grouped_chain`: both in one kernel, which `triton_expert_chain` launches;
  `device_experts`: what they share.
- `triton_calls`: a launch of a Triton kernel as a value, to be run or to be compiled for a GPU that is not there.
- `triton_catalog`: every launch that ships, by name: for tables of machine code; `triton_catalog_layers` lists those
  around products, `triton_entries` is what both are made of.
- `support`: which calls the Triton kernels take, one function a family; `registry` and `triton_ops` ask it.
- `blocking`: how a product is cut into programs; `tuned_problem`: for what, and which blockings give right numbers.
- `tuned_tables`: tables of tuned blockings, and which are in use; `tuned_json` reads and writes them, `tuned/` holds
  those that ship; `kernel_sources` says with which kernels a table was made.
- `triton_candidates`: the blockings that are worth a try; `tuned_launches` makes operands and launches of a problem.
- `registry`: which of them runs a layer, with the reason.
"""
