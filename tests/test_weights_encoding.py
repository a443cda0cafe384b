"""Values into the parts of converted weights: what is refused, and that matrices of experts are read one by one."""

import pytest
import torch

from olq_fx.errors import ConversionError
from olq_fx.weights_encoding import check_values, count_nonfinite


def test_values_are_checked():
    check_values(torch.randn(3, 4), "w")
    check_values(torch.tensor(1.0), "w")
    with pytest.raises(ConversionError, match=r"w cannot be given values of torch\.int64"):
        check_values(torch.ones(3, 4, dtype=torch.long), "w")
    with pytest.raises(ConversionError, match="1 of 12 are NaN or Inf"):
        check_values(torch.tensor([[float("nan")] + [0.0] * 11]), "w")


def test_bad_values_of_all_experts_are_counted():
    values = torch.zeros(3, 4, 5)
    values[0, 1, 2], values[2, 3, 4], values[2, 0, 0] = torch.nan, torch.inf, -torch.inf
    assert count_nonfinite(values) == count_nonfinite(values.mT) == 3
    with pytest.raises(ConversionError, match="3 of 60 are NaN or Inf"):
        check_values(values, "w")
