"""Every device function has the bits of its namesake in the reference: see device_numbers.py for what is tried."""

import ast
import inspect

import device_checks
import device_numbers
import producer_checks
import pytest
import torch
from device_checks import CHECKS

from olq_fx.kernels import device, device_producers, device_scales


@pytest.mark.parametrize(("name", "native"), CHECKS, ids=lambda value: str(value))
def test_it_has_the_bits_of_the_reference(interpreter, name, native):
    interpreter.call(device_checks.run_named, name, native)


@pytest.mark.parametrize("name", producer_checks.CHECKS)
def test_a_producer_has_the_bits_of_its_definition(interpreter, name):
    interpreter.call(producer_checks.run_named, name)


@pytest.mark.parametrize("module", [device, device_scales, device_producers], ids=lambda module: module.__name__)
def test_every_device_function_is_tried(module):
    """Those of a private name are parts of others."""
    tree = ast.parse(inspect.getsource(module))
    public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    assert public
    assert public <= {check.function for check in (*CHECKS.values(), *producer_checks.CHECKS.values())}


def test_the_numbers_are_those_where_something_changes():
    values = device_numbers.floats()
    assert len(values) > 1 << 17
    found = set(values.view(torch.int32).tolist())
    assert {0, -(1 << 31), 0x7F800000, 0x00000001, 0x7F7FFFFF} <= found
    assert {0x3C800000, 0x3C7FFFFF, 0x3E800000, 0x3E800001, 0x40A00000, 0x409FFFFF} <= found
