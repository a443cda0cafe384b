"""Golden rows: what each format and rule makes of one fixed tensor, so that no change of a byte goes unseen.

One line of `data/golden_numerics.jsonl` for each format and rule. A new format or rule adds its line: the failing test
prints it. That the bytes are right is for other tests to say (`test_numerics_model.py`).
"""

import functools
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from olq_fx.formats import FORMATS
from olq_fx.numerics import dequantize, part_specs, quantize

GOLDEN = Path(__file__).parent / "data" / "golden_numerics.jsonl"
ROWS, K = 130, 560
CASES = [(fmt.name, rule) for fmt in FORMATS.values() for rule in fmt.rules]


@functools.cache
def _x() -> Tensor:
    """(130, 560), nearly normal, rows of different size, exact in float32 whatever computes it."""
    generator = np.random.RandomState(20261129)
    bell = generator.randint(0, 4096, (12, ROWS, K)).sum(axis=0) - 6 * 4095
    return torch.from_numpy(np.ldexp(bell.astype(np.float32), generator.randint(-18, -6, (ROWS, 1))))


def _bytes(part: Tensor) -> bytes:
    return part.contiguous().view(torch.uint8).numpy().tobytes()


def _row(name: str, rule: str) -> dict[str, str | float]:
    fmt, x = FORMATS[name], _x()
    parts = quantize(x, fmt, rule)
    row: dict[str, str | float] = {"format": name, "rule": rule}
    for spec, part in zip(part_specs(fmt, ROWS, K), parts, strict=True):
        row[spec.name] = hashlib.sha256(_bytes(part)).hexdigest()[:16]
        row[f"first {spec.name}"] = _bytes(part[0])[:16].hex()
    error = (dequantize(parts, fmt, K).double() - x.double()).square().sum() / x.double().square().sum()
    return row | {"error": round(error.sqrt().item(), 5)}


def _golden() -> dict[tuple[str, str], dict[str, str | float]]:
    rows = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    return {(row["format"], row["rule"]): row for row in rows}


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_bytes_and_error_are_the_golden_ones(name: str, rule: str) -> None:
    row = _row(name, rule)
    assert _golden().get((name, rule)) == row, f"not the golden row; this is the row now:\n{json.dumps(row)}"


def test_every_golden_row_has_its_format_and_rule() -> None:
    assert list(_golden()) == CASES


def test_the_tensor_is_the_one_the_rows_were_made_of() -> None:
    assert hashlib.sha256(_bytes(_x())).hexdigest()[:16] == "e8c42de8a1c75a5e"
