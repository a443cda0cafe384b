"""Checks of one Triton kernel: its values in the interpreter, its machine code for GPUs that are not there.

@given(tensors())
def test_my_kernel(interpreter, x):
    assert_kernel_values(interpreter, launch_my_kernel, reference, x)

def test_its_code():
    assert_kernel_code(my_kernel, (x, out, n), {"BLOCK": 128}, {90: "wgmma.*e4m3"})
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from olq_fx.testing_bits import assert_same_bits
from olq_fx.testing_interpreter import Interpreter
from olq_fx.testing_machine_code import MachineCode, machine_code

Compare = Callable[[Any, Any], None]


def same_values(actual: Any, expected: Any) -> None:
    """`assert_same_bits`, but that every NaN equals every other one."""
    assert_same_bits(actual, expected, any_nan=True)


def assert_kernel_values(
    interpreter: Interpreter,
    launch: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    compare: Compare = same_values,
    **kwargs: Any,
) -> Any:
    """Hold a function that launches Triton kernels to another that defines its values.

    What it allocates begins as NaN, accesses outside of its tensors are errors, a second run must give the same bits.

    Args:
        interpreter: where it runs.
        launch: allocates its results with torch, launches kernels, and returns them; it stands in a module.
        reference: takes the same arguments.
        args: CPU tensors of any dtype, layout and shape, and whatever else pickle takes.
        compare: called with what was returned and what was expected; raises AssertionError. By default bits must be
            equal, but for those of NaN.
        kwargs: likewise.

    Returns:
        What `launch` returned.
    """
    given = copy.deepcopy((args, kwargs))
    actual = interpreter.call(launch, *args, **kwargs)
    expected = reference(*args, **kwargs)
    assert_same_bits([*args, *kwargs.values()], [*given[0], *given[1].values()], name="arguments after the call")
    compare(actual, expected)
    assert_same_bits(interpreter.call(launch, *args, **kwargs), actual, any_nan=True, name="a second run")
    return actual


def assert_kernel_code(
    kernel: Any,
    args: Sequence[Any],
    constants: Mapping[str, Any],
    instructions: Mapping[int, str],
    **options: Any,
) -> list[MachineCode]:
    """Hold a kernel to its matrix instructions, to registers, and to the shared memory of each GPU.

    Args:
        kernel: a `triton.jit` function.
        args: its arguments but the constants; tensors may be on meta.
        constants: by name.
        instructions: by compute capability, a regular expression that each matrix instruction must match; "" where
            there is to be none.
        options: `num_warps`, `num_stages` and others of Triton's compiler.

    Returns:
        The code for each GPU.
    """
    codes = [machine_code(kernel, args, constants, capability, **options) for capability in instructions]
    for code in codes:
        code.assert_no_spills()
        code.assert_fits()
        wanted = instructions[code.capability]
        if wanted:
            code.assert_instruction(wanted)
        else:
            assert not code.instructions, f"{code.name} on sm_{code.capability} has {', '.join(code.instructions)}"
    return codes
