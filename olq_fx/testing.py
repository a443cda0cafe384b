"""The testing kit: what this project is tested with, for the tests of those who build on it.

- Bits: `assert_same_bits`, `bits_of`.
- Derived bounds: `half_step_bound`, `product_bound`, `assert_product_close`, `effective_scale`, `element_step`.
- Layers and operators: `operands`, `assert_layer_close`, `assert_operator_right`.
- Noise: `sqnr`, `assert_sqnr`.
- Graphs and kernels: `RecordingBackend`, `operator_name`, `count_kernels`.
- Code for a GPU, without one: `on_gpu`, `GpuCodeCompiled`.
- What Inductor emits for a GPU, run and compiled without one: `Emitter`, `EmittedCode`, `EmittedKernel`.
- Triton kernels, without a GPU: `assert_kernel_values`, `Interpreter`; `assert_kernel_code`, `machine_code`,
  `MachineCode`, `Compiler`; `PythonProcess`, `ProcessDied`.
- Memory: `storage_census`, `live_bytes`, `record_allocations`, `plain_tensors`.
- Small models: `MODELS`, `model_case`, `ModelCase`, `Conv1D`, `LlamaBlock`; large ones on meta: `decoder_layout`.
- Hypothesis strategies: `tensors`, `formats`, `schemes`, `configurations`, `models`; they need the package hypothesis,
  nothing else here does.
"""

from olq_fx.testing_bits import assert_same_bits, bits_of
from olq_fx.testing_bounds import (
    ProductInterval,
    assert_product_close,
    assert_sqnr,
    effective_scale,
    element_step,
    half_step_bound,
    product_bound,
    sqnr,
)
from olq_fx.testing_emitted import EmittedCode, EmittedKernel, Emitter
from olq_fx.testing_gpu import GpuCodeCompiled, on_gpu
from olq_fx.testing_graphs import Kernels, RecordedGraph, RecordingBackend, count_kernels, operator_name
from olq_fx.testing_interpreter import Interpreter
from olq_fx.testing_kernels import assert_kernel_code, assert_kernel_values
from olq_fx.testing_layers import assert_layer_close, assert_operator_right, operands
from olq_fx.testing_layouts import LLAMA_70B, MOE_235B, decoder_layout
from olq_fx.testing_machine_code import Compiler, MachineCode, machine_code
from olq_fx.testing_memory import (
    Allocations,
    StorageRecord,
    live_bytes,
    plain_tensors,
    record_allocations,
    storage_census,
)
from olq_fx.testing_models import MODELS, Conv1D, LlamaBlock, ModelCase, SelfAttention, model_case
from olq_fx.testing_process import ProcessDied, PythonProcess
from olq_fx.testing_strategies import (
    FLOAT_DTYPES,
    LAYOUTS,
    ROW_KINDS,
    FormatRule,
    configurations,
    formats,
    laid_out,
    models,
    schemes,
    tensors,
)

__all__ = [
    "FLOAT_DTYPES",
    "LAYOUTS",
    "LLAMA_70B",
    "MODELS",
    "MOE_235B",
    "ROW_KINDS",
    "Allocations",
    "Compiler",
    "Conv1D",
    "EmittedCode",
    "EmittedKernel",
    "Emitter",
    "FormatRule",
    "GpuCodeCompiled",
    "Interpreter",
    "Kernels",
    "LlamaBlock",
    "MachineCode",
    "ModelCase",
    "ProcessDied",
    "ProductInterval",
    "PythonProcess",
    "RecordedGraph",
    "RecordingBackend",
    "SelfAttention",
    "StorageRecord",
    "assert_kernel_code",
    "assert_kernel_values",
    "assert_layer_close",
    "assert_operator_right",
    "assert_product_close",
    "assert_same_bits",
    "assert_sqnr",
    "bits_of",
    "configurations",
    "count_kernels",
    "decoder_layout",
    "effective_scale",
    "element_step",
    "formats",
    "half_step_bound",
    "laid_out",
    "live_bytes",
    "machine_code",
    "model_case",
    "models",
    "on_gpu",
    "operands",
    "operator_name",
    "plain_tensors",
    "product_bound",
    "record_allocations",
    "schemes",
    "sqnr",
    "storage_census",
    "tensors",
]
