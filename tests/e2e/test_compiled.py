"""Compiled by Inductor: a pairwise covering array of schemes, routes, dtypes and groups of models.

Every pair of two values (a scheme with a dtype, a scheme with a group, a route with a dtype, ...) is compiled at least
once. The models of a group are compiled together, as one graph, so that every scheme meets every model.
"""

import gc
import importlib
import itertools
import pathlib
import random

import pytest
import torch

import olq_fx
from olq_fx.schemes import SCHEMES
from olq_fx.testing import FLOAT_DTYPES, RecordingBackend, assert_same_bits, live_bytes

FACTORS = {
    "scheme": list(SCHEMES),
    "dtype": list(FLOAT_DTYPES),
    "route": ["backend", "quantize_"],
    "group": ["encoder", "decoder", "functional"],
}

MOST_COMPILATIONS = 40

Row = tuple[object, ...]


def pairs_of(row: Row) -> set[tuple[int, int, object, object]]:
    return {(i, j, row[i], row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def pairwise(levels: list[list[object]], seed: int = 0) -> list[Row]:
    """Rows that hold every pair of levels of two factors: each row is the one of all that has the most new pairs."""
    rows = list(itertools.product(*levels))
    random.Random(seed).shuffle(rows)
    missing = set().union(*map(pairs_of, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return chosen


ROWS = pairwise(list(FACTORS.values()))


def test_the_array_covers_all_pairs_in_few_compilations():
    wanted = set().union(*map(pairs_of, itertools.product(*FACTORS.values())))
    assert set().union(*map(pairs_of, ROWS)) == wanted
    assert len(ROWS) <= MOST_COMPILATIONS


def test_the_groups_hold_every_model(zoo_groups, zoo_names):
    assert sorted(name for names in zoo_groups.values() for name in names) == sorted(zoo_names)
    assert list(zoo_groups) == FACTORS["group"]


def row_id(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("scheme", "dtype", "route", "group"), ROWS, ids=row_id)
def test_compiled_is_as_good_as_eager(scheme, dtype, route, group, several, compare, compiled_original):
    case = several(group, dtype)
    original = case.call_all(case.model)

    in_place = case.fresh()
    in_place.quantize(scheme)
    eager = in_place.call_all(in_place.model)

    if route == "quantize_":
        recording = RecordingBackend(None, inner="inductor")
        compiled = in_place.call_all(torch.compile(in_place.model, backend=recording))
    else:
        by_backend = case.fresh()
        recording = RecordingBackend(scheme, inner="inductor")
        run = torch.compile(by_backend.model, backend=recording)
        compiled = by_backend.call_all(run)
        check_life(by_backend, in_place, run, compiled)
        assert recording.backend is not None
        assert recording.backend.report.converted == case.weights
    recording.assert_compilations(1)
    baseline = compiled_original(group, dtype, original) if route == "quantize_" else original
    compare(route, original, eager, compiled, baseline)


def check_life(by_backend, in_place, run, compiled) -> None:
    """Originals are free after one compilation, codes and scales are those of `quantize_`, a second call is equal."""
    gc.collect()
    assert live_bytes(by_backend.model) == live_bytes(in_place.model)
    for path in in_place.weights:
        assert isinstance(by_backend.model.get_parameter(path), olq_fx.QuantizedWeight)
        assert_same_bits(by_backend.model.get_parameter(path), in_place.model.get_parameter(path), name=path)
    assert_same_bits(by_backend.call_all(run), compiled)


def test_the_table_of_the_sweep_has_every_model(zoo_names, monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
    sweep_table = importlib.import_module("sweep_table")

    assert sorted(sweep_table.MODELS) == sorted(zoo_names)
    assert tuple(FACTORS["route"]) == sweep_table.ROUTES
