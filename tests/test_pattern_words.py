"""What is read off patterns: enough to leave most paths out, and never too much."""

import pytest

from olq_fx.path_filter import PathFilter
from olq_fx.pattern_words import ANYTHING, Piece, Whole, glob_words, regex_words


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("*.layers.3.*_proj", [Whole("layers"), Whole("3"), Piece(("_proj",))]),
        ("layers.?", [Whole("layers")]),
        ("a?b.c", [Piece(("a", "b")), Whole("c")]),
        ("a.[bc]d", [Whole("a"), Piece(("d",))]),
        ("*.a[", [Whole("a[")]),
        ("x.[]y]z", [Whole("x"), Piece(("z",))]),
        ("a*", [Piece(("a",))]),
        ("*", []),
    ],
)
def test_globs(text, conditions):
    assert list(glob_words(text)[0]) == conditions


@pytest.mark.parametrize(
    ("body", "alternatives"),
    [
        (r"model\.layers\.3\.", [[Whole("model"), Whole("layers"), Whole("3")]]),
        (r".*layers\.3$", [[Piece(("layers",)), Whole("3")]]),
        ("layers.3.mlp", [[Piece(("layers", "3", "mlp"))]]),
        ("a.b.c.d", [[Piece(("a", "b", "c")), Piece(("b", "c", "d"))]]),
        (r"a\.(b|c)\.d", [[Whole("a"), Whole("b"), Piece(("d",))], [Whole("a"), Whole("c"), Piece(("d",))]]),
        ("a|b", [[Piece(("a",))], [Piece(("b",))]]),
        (r"(?:x\.)?ab+c", [[Piece(("ab",)), Piece(("c",))]]),
        ("(ab)+c", [[Piece(("ab",)), Piece(("c",))]]),
        ("(ab)*c", [[Piece(("c",))]]),
        ("ab{2}c", [[Piece(("a",)), Piece(("c",))]]),
        (r"ab+*c", [[Piece(("a",)), Piece(("c",))]]),
        (r"^a(?=b)b\b$", [[Whole("ab")]]),
        (r"(?P<n>a)(?<m>b)", [[Piece(("ab",))]]),
        (r"a\+", [[Piece(("a+",))]]),
        (r"a[0-9]b", [[Piece(("a", "b"))]]),
        (r".*\.\d", [[]]),
    ],
)
def test_expressions(body, alternatives):
    assert [list(one) for one in regex_words(body)] == alternatives


@pytest.mark.parametrize(
    "body",
    [
        "(?i)a",
        r"\x61",
        r"(a)\1",
        "(?R)",
        "[[:alpha:]]a",
        "[^[:digit:]]a",
        "(?>a)",
        "(*FAIL)a",
        "a||b",
        "(a|)",
        r"\Ka",
        "a{|b",
        "a{e<=1}",
    ],
)
def test_what_is_not_understood_leaves_no_path_out(body):
    assert regex_words(body) == ANYTHING


def test_many_alternatives_are_given_up():
    assert regex_words("|".join(f"a{n}" for n in range(17))) == ANYTHING
    assert len(regex_words("(a|b)(c|d)(e|f)(g|h)")) == 16
    assert regex_words("(a|b)(c|d)(e|f)(g|h)(i|j)k") == tuple(
        (Piece((text,)), Piece(("k",))) for text in ("aceg", "aceh", "acfg", "acfh", "adeg", "adeh", "adfg", "adfh")
    ) + tuple(
        (Piece((text,)), Piece(("k",))) for text in ("bceg", "bceh", "bcfg", "bcfh", "bdeg", "bdeh", "bdfg", "bdfh")
    )
    assert regex_words("(" * 60 + "a" + ")" * 60) == ANYTHING


@pytest.mark.parametrize(
    ("alternatives", "found"),
    [
        (ANYTHING, [0, 1, 2, 3]),
        (((Whole("b"),),), [0]),
        (((Piece(("b",)),),), [0, 1, 2]),
        (((Piece(("a", "b")),),), [0, 1]),
        (((Piece(("a", "b", "c")),),), [0]),
        (((Whole("b"), Whole("z")),), []),
        (((Whole("b"),), (Whole("z"),)), [0, 3]),
    ],
)
def test_paths_that_fulfil_conditions(alternatives, found):
    assert list(PathFilter(["a.b.c", "x.a_bd", "b0", "z"]).positions(alternatives)) == found


def test_many_positions_are_found_in_order():
    paths = [f"{'ab'[number % 3 == 0]}.{number}" for number in range(1000)]
    assert list(PathFilter(paths).positions([(Whole("b"),)])) == list(range(0, 1000, 3))


def test_line_breaks_in_paths_switch_the_filter_off():
    assert list(PathFilter(["a\nb", "c"]).positions([(Whole("x"),)])) == [0, 1]
