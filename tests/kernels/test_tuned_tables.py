"""Tuned tables: written and read back, refused by name, ignored where they are stale, followed where in use."""

import dataclasses
import json
import pickle
import threading

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx import numerics
from olq_fx.errors import ConfigurationError, ConfigurationTypeError
from olq_fx.formats import get_format
from olq_fx.kernels import kernel_sources, reference, triton_experts, triton_linear_chain, tuned_tables
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.experts import Segments, Stack
from olq_fx.kernels.kernel_sources import FAMILIES, source_hash, triton_minor
from olq_fx.kernels.triton_candidates import Work, candidates_of
from olq_fx.kernels.triton_linear_chain import Chain
from olq_fx.kernels.triton_product import product_calls
from olq_fx.kernels.tuned_json import from_text, load, read_index, save, to_text
from olq_fx.kernels.tuned_launches import launches
from olq_fx.kernels.tuned_problem import Problem
from olq_fx.kernels.tuned_tables import Choice, TunedTable, blocking_for, use_tuned

CPU = torch.device("cpu")
PRODUCT = Problem(
    family="product", activation="mxfp8", weight="mxfp8", dtype="bfloat16", m=64, n=128, k=256, fast_accum=False
)
CHAIN = dataclasses.replace(PRODUCT, family="chain", chain="silu", gated="paired", output="mxfp8")
GROUPED = dataclasses.replace(PRODUCT, family="grouped", experts=4)
FIRST = Blocking(64, 64, 64)
TUNED = Blocking(32, 64, 32, num_stages=4)
CHOICE = Choice(blocking=TUNED, first=FIRST, measured=True, seconds=1.5e-5, first_seconds=2e-5)


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch):
    """Tables are of no GPU that may be here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def table(*problems, choice=CHOICE, capability=90, device=""):
    return TunedTable.of(dict.fromkeys(problems or (PRODUCT,), choice), capability, device)


# Files


def test_a_table_survives_being_written(tmp_path):
    wanted = table(PRODUCT, CHAIN, GROUPED, dataclasses.replace(PRODUCT, activation="", m=1), device="NVIDIA H200")
    save(wanted, tmp_path / "table.json")
    found = load(tmp_path / "table.json")
    assert found == wanted
    assert found.origin == str(tmp_path / "table.json")
    assert found.ignored == ()
    assert to_text(found) == (tmp_path / "table.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_a_choice_without_measurement_survives_too():
    unmeasured = table(choice=Choice(blocking=TUNED, first=FIRST))
    assert from_text(to_text(unmeasured), "x") == unmeasured
    assert from_text(to_text(table(choice=CHOICE)), "x") != unmeasured


def changed(**changes):
    """A table as JSON values, with some of them changed; None takes one out."""
    data = json.loads(to_text(table()))
    for path, value in changes.items():
        target, (*parents, last) = data, path.split("__")
        for parent in parents:
            target = target[int(parent)] if isinstance(target, list) else target[parent]
        if value is None:
            del target[last]
        else:
            target[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "x.json: malformed JSON"),
        ("[]", "x.json: a JSON object is wanted, not []"),
        ('{"format": "a", "format": "b"}', "a key stands twice among format"),
        ('{"format": NaN}', "NaN is no number of JSON"),
        ("[" * 100_000, "malformed JSON"),
        (changed(format="gemlite"), "no file of the kind 'olq_fx tuned blockings', but 'gemlite'"),
        (changed(version=2), "version 2 is not known here; valid: 1"),
        (changed(version=True), "version True is not known here"),
        (changed(version=None), "version None is not known here"),
        (changed(capability="90"), "capability is of type int, not '90'"),
        (changed(colour="red"), "'colour' is not known"),
        (changed(device=None), "'device' is missing"),
        (changed(sources__products="0"), "no kernel is called 'products'; valid: product, chain, grouped"),
        (changed(sources__product=3), "sources are hashes"),
        (changed(sources={}), "entry 0: the sources of product are not named"),
        (changed(entries={}), "entries is of type list"),
        (changed(entries=[3]), "entry 0: a JSON object is wanted"),
        (changed(entries__0__family="gemm"), "entry 0: no kernel is called 'gemm'"),
        (changed(entries__0__weight="mxfp9"), "mxfp9"),
        (changed(entries__0__weight="fp8_per_token"), "'fp8_per_token' is no weight format"),
        (changed(entries__0__m=63), "m is a power of two"),
        (changed(entries__0__n=0), "n and k are positive"),
        (changed(entries__0__m=64.0), "m is of type int, not 64.0"),
        (changed(entries__0__fast_accum=0), "fast_accum is of type bool, not 0"),
        (changed(entries__0__dtype="float64"), "dtype is one of 'bfloat16', 'float16', 'float32', not 'float64'"),
        (changed(entries__0__experts=2), "experts is for grouped products"),
        (changed(entries__0__output="mxfp8"), "output is for chains"),
        (changed(entries__0__note="x"), "'note' is not known"),
        (changed(entries__0__blocking__block_x=1), "entry 0: blocking: 'block_x' is not known"),
        (changed(entries__0__blocking__block_m=None), "'block_m' is missing"),
        (changed(entries__0__blocking__swap=1), "swap is of type bool, not 1"),
        (changed(entries__0__blocking__block_m=True), "block_m is of type int, not True"),
        (changed(entries__0__blocking__block_m=48), "blocking: block_m is a power of two, not 48"),
        (changed(entries__0__blocking__block_k=16), "a multiple of the 32 columns of a scale of mxfp8, not 16"),
        (changed(entries__0__blocking__num_warps=64), "num_warps is a number from 1 to 32"),
        (changed(entries__0__first__block_k=256), "first: block_k is at most 128"),
        (changed(entries__0__blocking__form="rows"), "form is one of 'tiles', 'persistent', 'gemv', not 'rows'"),
        (changed(entries__0__blocking__form="gemv"), "'gemv' is for one row"),
        (changed(entries__0__blocking__form=1), "form is of type str, not 1"),
        (changed(entries__0__seconds=-1.0), "seconds is a positive number, not -1.0"),
        (changed(entries__0__seconds="fast"), "seconds is of type int or float or null, not 'fast'"),
        (changed(entries__0__measured=False), "seconds are given where something was measured"),
    ],
)
def test_what_is_no_table_is_refused_by_name(text, said):
    with pytest.raises(ConfigurationError) as caught:
        from_text(text, "x.json")
    assert said in str(caught.value)
    assert str(caught.value).startswith("x.json: ")


def test_a_problem_that_stands_twice_is_refused():
    data = json.loads(to_text(table()))
    data["entries"] *= 2
    with pytest.raises(ConfigurationError, match="entry 1: the same problem stands there twice: product mxfp8 x mxfp8"):
        from_text(json.dumps(data), "x.json")


def test_files_that_cannot_be_read_or_written_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nothing\.json: there is no file of that name"):
        load(tmp_path / "nothing.json")
    with pytest.raises(ConfigurationError, match="no file of that name"):
        load(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load(tmp_path / "bytes.json")
    with pytest.raises(ConfigurationError, match="no table can be written there"):
        save(table(), tmp_path / "no" / "folder.json")
    with pytest.raises(ConfigurationTypeError, match=r"a tuned table is an olq_fx\.TunedTable or the path of a file"):
        tuned_tables.tables_of([3])


def test_a_choice_that_breaks_a_rule_makes_no_table():
    """Also without a file: a scale of 32 columns is not applied to sums over 64."""
    problem = dataclasses.replace(PRODUCT, activation="fp8_per_block_dynamic_1x32", weight="fp8_per_block_static_32x32")
    with pytest.raises(
        ConfigurationError, match="block_k divides the 32 columns of a scale of fp8_per_block_static_32x32"
    ):
        table(problem, choice=dataclasses.replace(CHOICE, blocking=Blocking(64, 64, 64), first=Blocking(64, 64, 32)))


def test_the_shipped_tables_are_read():
    assert read_index() == tuned_tables.shipped() == ()


# Stale tables


@pytest.fixture
def other_triton(monkeypatch):
    def set_to(minor):
        for module in (kernel_sources, tuned_tables):
            monkeypatch.setattr(module, "triton_minor", lambda: minor)

    return set_to


def in_use(one):
    """With a table in use: what is not followed, and the blockings of two problems."""
    with use_tuned(one) as used:
        return used.ignored, blocking_for(PRODUCT, 90, CPU), blocking_for(GROUPED, 90, CPU)


@pytest.mark.parametrize(("minor", "here"), [("3.9", "triton 3.9 is installed"), ("", "triton is not installed")])
def test_a_table_of_another_triton_is_ignored_and_says_so(other_triton, tmp_path, minor, here):
    save(table(), tmp_path / "t.json")
    other_triton(minor)
    found = load(tmp_path / "t.json")
    [reason] = found.ignored
    assert reason == f"{tmp_path / 't.json'} was made with triton {triton_minor()}, and {here}"
    assert not found.choices
    with pytest.warns(olq_fx.OlqFxWarning, match="a tuned table is not followed"):
        assert in_use(found) == ((reason,), None, None)


def test_a_table_of_changed_kernels_is_ignored_as_far_as_they_changed(monkeypatch, tmp_path):
    save(table(PRODUCT, GROUPED), tmp_path / "t.json")
    kept = load(tmp_path / "t.json")
    hashes = {family: source_hash(family) for family in FAMILIES} | {"grouped": "0" * 16}
    monkeypatch.setattr(tuned_tables, "source_hash", hashes.__getitem__)
    for found in (load(tmp_path / "t.json"), kept):
        [reason] = found.ignored
        assert "was made with other sources of the kernel grouped" in reason
        with pytest.warns(olq_fx.OlqFxWarning, match="kernel grouped"):
            assert in_use(found) == ((reason,), TUNED, None)


def test_entries_of_a_stale_table_may_have_fields_that_are_unknown_here(other_triton):
    text = changed(entries__0__blocking__warp_groups=3)
    with pytest.raises(ConfigurationError, match="'warp_groups' is not known"):
        from_text(text, "x")
    other_triton("3.9")
    assert from_text(text, "x").choices == {}
    assert "made with triton" in from_text(text, "x").ignored[0]


@pytest.mark.parametrize("problem", [PRODUCT, dataclasses.replace(PRODUCT, m=1), CHAIN, GROUPED], ids=str)
def test_every_kernel_that_is_launched_is_among_the_sources(problem):
    work = Work.of(problem, 90)
    for blocking in candidates_of(work, 40):
        for call in launches(problem, work.operands, 90, blocking):
            module = call.kernel.fn.__module__.rpartition(".")[2]
            assert module in kernel_sources.sources(problem.family)


@pytest.mark.parametrize("module", ["triton_matmul", "device", "triton_encode"])
def test_sources_are_those_of_the_kernel_and_of_what_it_calls(monkeypatch, tmp_path, module):
    for path in kernel_sources._FOLDER.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / f"{module}.py").write_text((tmp_path / f"{module}.py").read_text() + "\nOTHER = 1\n")
    before = {family: source_hash(family) for family in FAMILIES}
    monkeypatch.setattr(kernel_sources, "_FOLDER", tmp_path)
    source_hash.cache_clear()
    try:
        after = {family: source_hash(family) for family in FAMILIES}
    finally:
        source_hash.cache_clear()
    assert {family for family in FAMILIES if after[family] != before[family]} == (
        {"chain", "grouped"} if module == "triton_encode" else set(FAMILIES)
    )


@pytest.mark.parametrize(
    ("capability", "device", "said"),
    [
        (100, "", "is for sm_90, not for sm_100"),
        (90, "NVIDIA H100", "is for NVIDIA H200, not for NVIDIA H100"),
        (90, "", "not for another device"),
        (90, "NVIDIA H200", ""),
    ],
)
def test_a_table_is_for_one_gpu(monkeypatch, capability, device, said):
    measured = table(device="NVIDIA H200")
    assert said in measured.elsewhere(capability, device)
    assert bool(measured.elsewhere(capability, device)) == bool(said)
    monkeypatch.setattr(tuned_tables, "_name_of", lambda _: device)
    with use_tuned(measured):
        assert blocking_for(PRODUCT, capability, CPU) == (None if said else TUNED)


def test_what_is_for_another_gpu_than_the_one_here_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuned_tables, "capability_of", lambda device: 90)
    monkeypatch.setattr(tuned_tables, "_gpu_name", lambda index: "NVIDIA H200")
    assert in_use(table(device="NVIDIA H200")) == ((), None, None)  # tensors of the CPU
    with pytest.warns(olq_fx.OlqFxWarning, match="is for sm_100, not for sm_90"):
        assert in_use(table(capability=100)) == (("a table is for sm_100, not for sm_90",), None, None)


# In use


def test_the_innermost_table_comes_first_and_contexts_end():
    other = dataclasses.replace(CHOICE, blocking=FIRST)
    assert blocking_for(PRODUCT, 90, CPU) is None
    with use_tuned(table(PRODUCT, CHAIN)) as used:
        assert used.ignored == ()
        with use_tuned(table(choice=other)):
            assert blocking_for(PRODUCT, 90, CPU) == FIRST
            assert blocking_for(CHAIN, 90, CPU) == TUNED
        assert blocking_for(PRODUCT, 90, CPU) == TUNED
        with use_tuned(table(), table(choice=other)):
            assert blocking_for(PRODUCT, 90, CPU) == TUNED
    assert blocking_for(PRODUCT, 90, CPU) is None


def test_threads_do_not_disturb_each_other():
    both = threading.Barrier(2)
    found = {}

    def follow(number, blocking):
        with use_tuned(table(choice=dataclasses.replace(CHOICE, blocking=blocking))):
            both.wait(30)
            found[number] = blocking_for(PRODUCT, 90, CPU)
            both.wait(30)

    threads = [threading.Thread(target=follow, args=pair) for pair in enumerate((FIRST, TUNED))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: FIRST, 1: TUNED}
    assert blocking_for(PRODUCT, 90, CPU) is None


def parts(format, rows, k):
    return list(reference.quantize(torch.randn(rows, k), format, get_format(format).rules[0]))


def cut(call):
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    return (*(call.constants[name] for name in names), call.num_stages)


@pytest.mark.parametrize(("m", "followed"), [(33, True), (64, True), (32, False), (65, False)])
def test_products_are_cut_as_the_table_says_from_above_half_of_m(m, followed):
    def calls(k=256, **more):
        out = torch.empty(m, 128, dtype=torch.bfloat16)
        given = (parts("mxfp8", m, k), "mxfp8", parts("mxfp8", 128, k), "mxfp8", k, out)
        return product_calls(*given, **{"capability": 90, **more})

    plain = calls()
    with use_tuned(table()):
        tuned = calls()
        assert (cut(tuned[0]) == (32, 64, 32, 4)) == followed
        assert (cut(tuned[0]) == cut(plain[0])) == (not followed)
        assert cut(calls(k=512)[0]) != (32, 64, 32, 4)
        assert cut(calls(capability=100)[0]) != (32, 64, 32, 4)
        assert cut(calls(blocking=Blocking(16, 64, 64))[0]) == (16, 64, 64, 3)
    assert cut(calls()[0]) == cut(plain[0])


def test_activations_in_original_precision_are_found_by_their_dtype():
    problem = dataclasses.replace(PRODUCT, activation="", dtype="float16")
    with use_tuned(table(problem)):
        for dtype in (torch.float16, torch.bfloat16):
            x, out = torch.randn(64, 256, dtype=dtype), torch.empty(64, 128, dtype=dtype)
            [call, *_] = product_calls([x], "", parts("mxfp8", 128, 256), "mxfp8", 256, out, capability=90)
            assert (cut(call) == (32, 64, 32, 4)) == (dtype is torch.float16)


def test_fast_accumulation_is_a_problem_of_its_own():
    names = {"activation": "fp8_per_token", "weight": "fp8_per_channel_static"}
    with use_tuned(table(dataclasses.replace(PRODUCT, **names, fast_accum=True))):
        x, weight = parts(names["activation"], 64, 256), parts(names["weight"], 128, 256)
        for fast in (False, True):
            given = (x, names["activation"], weight, names["weight"], 256, torch.empty(64, 128, dtype=torch.bfloat16))
            [call, *_] = product_calls(*given, capability=90, fast_accum=fast)
            assert (cut(call) == (32, 64, 32, 4)) == fast


@pytest.fixture
def launched(monkeypatch):
    """The calls that were to be run."""
    found = []
    for module in (triton_linear_chain, triton_experts):
        monkeypatch.setattr(module, "run", found.extend)
    return found


def test_chains_are_cut_as_the_table_says(launched):
    blocking = Blocking(128, 32, 64, num_warps=8)
    x, weight = parts("mxfp8", 50, 256), parts("mxfp8", 128, 256)
    given = (x, "mxfp8", weight, "mxfp8", 256, torch.bfloat16)
    with use_tuned(table(CHAIN, choice=dataclasses.replace(CHOICE, blocking=blocking))):
        for chain in (Chain("silu", "paired"), Chain("gelu", "paired")):
            triton_linear_chain.linear_chain_quantize(*given, chain, "mxfp8", "ceil", capability=90)
    first, second = map(cut, launched)
    assert first == (128, 32, 64, 3)
    assert second != first


def test_grouped_products_are_cut_as_the_table_says(launched):
    given = (parts("mxfp8", 64, 256), "mxfp8")
    for count in (4, 5):
        stack = Stack([torch.stack([part] * count) for part in parts("mxfp8", 128, 256)], "mxfp8")
        segments = Segments(torch.linspace(0, 64, count + 1).to(torch.int32))
        with use_tuned(table(GROUPED)):
            triton_experts.grouped_linear(*given, stack, 256, torch.bfloat16, segments, capability=90)
    first, second = [cut(call) for call in launched if "DOT" in call.constants]
    assert first == (32, 64, 32, 4)
    assert second != first


def test_a_tuned_product_is_the_product(interpreter):
    """In the interpreter, through the dispatch: other tiles, the same numbers."""
    x, weight = parts("mxfp8", 40, 256), parts("mxfp8", 128, 256)
    plain = interpreter.call(multiplied, x, weight, None)
    tuned = interpreter.call(multiplied, x, weight, to_text(table()))
    torch.testing.assert_close(tuned, plain, rtol=2.0**-7, atol=1e-3)
    exact = numerics.dequantize(tuple(x), get_format("mxfp8"), 256).double()
    exact = exact @ numerics.dequantize(tuple(weight), get_format("mxfp8"), 256).double().T
    torch.testing.assert_close(tuned.double(), exact, rtol=2.0**-7, atol=1e-3)


def multiplied(x, weight, text):
    from olq_fx.kernels.triton_product import quantized_linear

    given = (x, "mxfp8", weight, "mxfp8", 256, torch.bfloat16, None, None, 90)
    if text is None:
        return quantized_linear(*given)
    with use_tuned(from_text(text, "the test")):
        return quantized_linear(*given)


# The backend


def test_a_backend_follows_its_tables_in_each_call_and_in_no_other(tmp_path):
    save(table(), tmp_path / "t.json")
    seen = []

    def inner(gm, inputs):
        def run(*args):
            seen.append(tuned_tables._USED.get())
            return gm(*args)

        return run

    models = {name: nn.Linear(64, 48) for name in ("tuned", "plain", "named")}
    x = torch.randn(3, 64)
    backends = {
        "tuned": olq_fx.backend("mxfp8", inner=inner, tuned=[tmp_path / "t.json", table(CHAIN)]),
        "plain": olq_fx.backend("mxfp8", inner=inner),
        "named": olq_fx.backend("mxfp8", inner=inner, tuned=str(tmp_path / "t.json")),
    }
    with torch.no_grad():
        for name, model in models.items():
            seen.clear()
            torch.compiler.reset()
            compiled = torch.compile(model, backend=backends[name])
            compiled(x)
            compiled(x)
            lengths = {"tuned": 2, "plain": 0, "named": 1}
            assert [len(tables) for tables in seen] == [lengths[name]] * 2
    assert tuned_tables._USED.get() == ()


def test_a_backend_refuses_what_is_no_table(tmp_path):
    with pytest.raises(ConfigurationError, match="there is no file of that name"):
        olq_fx.backend("mxfp8", tuned=tmp_path / "none.json")
    with pytest.raises(ConfigurationTypeError, match="a tuned table is"):
        olq_fx.backend("mxfp8", tuned=3)


def test_the_option_of_torch_compile(tmp_path):
    save(table(), tmp_path / "t.json")
    options = {"scheme": "mxfp8", "inner": "eager", "tuned": str(tmp_path / "t.json")}
    model = nn.Linear(64, 48)
    with torch.no_grad():
        x = torch.randn(3, 64)
        assert torch.compile(model, backend="olq_fx", options=options)(x).shape == (3, 48)


def test_tables_are_values():
    assert pickle.loads(pickle.dumps(PRODUCT)) == PRODUCT
    assert hash(PRODUCT) == hash(dataclasses.replace(PRODUCT))
    with pytest.raises(TypeError):
        table().choices[PRODUCT] = CHOICE  # type: ignore[index]
    assert PRODUCT.title == "product mxfp8 x mxfp8, 64 x 128 x 256"
    assert GROUPED.title == "grouped mxfp8 x mxfp8, 64 x 128 x 256, 4 experts"
    assert CHAIN.title == "chain mxfp8 x mxfp8, 64 x 128 x 256, gated silu, to mxfp8"
