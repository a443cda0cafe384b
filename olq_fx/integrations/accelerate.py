"""What accelerate is given: how many bytes it is to count for quantized weights.

    from olq_fx.integrations.accelerate import special_dtypes

    infer_auto_device_map(model, max_memory=..., special_dtypes=special_dtypes(model))

By itself it counts the dtype that a weight claims, its original one.
"""

from typing import Any

import torch
from torch import nn

from olq_fx.conversion import converted_weights_of


def special_dtypes(model: nn.Module) -> dict[str, Any]:
    """For each converted or pending weight, by its path, a dtype of as many bits as its codes have.

    Scales are not counted: they are 1/8 of the codes at most (`nvfp4`), and far less in formats of 8 bits.
    """
    from accelerate.utils import CustomDtype

    return {
        path: CustomDtype.INT4 if weight.spec.format.packed else torch.int8
        for path, weight in converted_weights_of(model).items()
    }
