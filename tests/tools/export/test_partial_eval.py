"""Partial evaluation of CUDA texts, rule by rule, on short texts."""

from __future__ import annotations

import pytest

from polyconv.tools.export.partial_eval.constants import constants_of, evaluated
from polyconv.tools.export.partial_eval.fields import with_fixed_parameters, without_assignments
from polyconv.tools.export.partial_eval.folding import folded, simplified, without_copies, without_unused
from polyconv.tools.export.partial_eval.layout import compacted, tidied, with_pragmas_in_line, wrapped
from polyconv.tools.export.partial_eval.scanning import definitions, name_of, reachable, split
from polyconv.tools.export.partial_eval.templates import (
    without_aliases,
    without_settled_parameters,
    without_zero_members,
)

TEXT = """\
// What the file is about.

constexpr int kTile = 4, kTwice = 2 * kTile;
// A pair.
struct Pair {
  int a, b;
};
template <class T>
__device__ __forceinline__ int first(const T& pair) {
  return pair.a;
}

#define UNROLL _Pragma("unroll")
#if __CUDA_ARCH__ >= 800
#define COPY 1
#else
#define COPY 0
#endif
using i64 = long long;
enum : int { kNothing, kSomething };
__global__ void __launch_bounds__(128) kernel(const Pair p) {
  first(p);
}
static const char* launch(const Pair& p) {
  kernel<<<1, 128>>>(p);
  return nullptr;
}
"""


def test_definitions_and_their_names() -> None:
    parts = definitions(TEXT)
    assert "".join(parts) == TEXT
    names = [name for name in map(name_of, parts) if name is not None]
    assert names == ["kTile", "Pair", "first", "UNROLL", "COPY", "i64", "kNothing", "kernel", "launch"]
    (pair,) = (part for part in parts if name_of(part) == "Pair")
    assert pair.startswith("// A pair.\nstruct Pair {")


def test_only_what_is_reachable_stays() -> None:
    assert list(map(name_of, reachable(definitions(TEXT), ["launch"]))) == ["Pair", "first", "kernel", "launch"]
    assert list(map(name_of, reachable(definitions(TEXT), ["kTwice"]))) == []
    assert reachable(definitions(TEXT), []) == []


def test_what_stood_apart_stands_apart() -> None:
    text = "int a = 1;\n\nint f() {}\nint g() {}\n"
    assert reachable(definitions(text), ["f", "g"]) == ["\nint f() {}\n", "int g() {}\n"]
    assert reachable(definitions(text), ["g"]) == ["\nint g() {}\n"]


def test_a_name_in_a_comment_is_no_use_of_it() -> None:
    text = "int other() {\n  return 1;\n}\nint one() {  // not other\n  return 2;\n}\n"
    assert list(map(name_of, reachable(definitions(text), ["one"]))) == ["one"]


def test_split_outside_brackets() -> None:
    assert split("a, f(b, c), Pair<d, e>{g, h}, i[j, k]") == ["a", "f(b, c)", "Pair<d, e>{g, h}", "i[j, k]"]
    assert split("a = b < c, d = e->f(g >> 2, h), i = 1 << j") == ["a = b < c", "d = e->f(g >> 2, h)", "i = 1 << j"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("kTaps * 2 + 1", 11),
        ("(kTaps + 1) / 4", 1),
        ("7 % kTaps", 2),
        ("F45::kTiles > 1", 0),
        ("kTaps == 5 && !kNothing", 1),
        ("kNothing || kTaps != 5", 0),
        ("kTaps > 4 ? 64 : 32", 64),
        ("true", 1),
        ("kNothing && p.rows > 3", 0),  # whatever that is
        ("kTaps > 4 || p.rows > 3", 1),
        ("p.rows > 3 && kNothing", 0),
        ("p.rows > 3 || kNothing && kTaps", None),
        ("p.rows", None),
        ("kUnknown + 1", None),
        ("kTaps > p.rows ? 1 : 2", None),
        ("1.5f", None),
        ("kTaps / kNothing", None),
        ("", None),
    ],
)
def test_constant_expressions(expression: str, value: int | None) -> None:
    assert evaluated(expression, {"kTaps": 5, "kNothing": 0, "F45::kTiles": 1}) == value


def test_constants_of_a_text() -> None:
    text = (
        "constexpr int kA = 3, kB = kA * (kA + 1);  // both\nconstexpr bool kC = kB > 11;\nconstexpr int kD = rows();\n"
    )
    assert constants_of(text, {"kZ": 1}) == {"kZ": 1, "kA": 3, "kB": 12, "kC": 1}


# ---- branches


def in_function(*lines: str) -> str:
    return "\n".join(["int f(int x) {", *lines, "}", ""])


@pytest.mark.parametrize("keyword", ["if constexpr", "if"])
def test_the_branch_that_is_taken_stays(keyword: str) -> None:
    text = in_function(
        f"  {keyword} (kMany) {{", "    x += 1;", "    x += 2;", "  } else {", "    x -= 1;", "  }", "  g();"
    )
    assert folded(text, {"kMany": 1}) == in_function("  x += 1;", "  x += 2;", "  g();")
    assert folded(text, {"kMany": 0}) == in_function("  x -= 1;", "  g();")
    assert folded(text, {}) == text


def test_a_branch_that_is_not_taken_leaves_no_line() -> None:
    text = in_function("  g();", "  if (kMany) {", "    x += 1;", "  }", "  h();")
    assert folded(text, {"kMany": 0}) == in_function("  g();", "  h();")


def test_branches_without_braces_and_in_chains() -> None:
    text = in_function("  if (kSide == 0) x = 1;", "  else if (kSide == 1) x = 2;", "  else x = 3;", "  g();")
    for side in range(3):
        assert folded(text, {"kSide": side}) == in_function(f"  x = {side + 1};", "  g();")


def test_branches_inside_branches() -> None:
    text = in_function("  if (kA) {", "    if (kB) {", "      x = 1;", "    }", "    g();", "  }")
    assert folded(text, {"kA": 1, "kB": 1}) == in_function("  x = 1;", "  g();")
    assert folded(text, {"kA": 1, "kB": 0}) == in_function("  g();")
    assert folded(text, {"kA": 0, "kB": 1}) == in_function()


def test_a_loop_is_one_statement() -> None:
    text = in_function("  if (kA)", "    UNROLL for (int i = 0; i < 4; i++)", "      if (i > x) g();", "  h();")
    assert "g();" in folded(text, {"kA": 1})
    assert folded(text, {"kA": 0}) == in_function("  h();")


def test_what_follows_a_return_is_dropped() -> None:
    text = in_function("  if (kZero) return x;", "  if (x > 3) {", "    g();", "  }", "  return 7;") + "int next = 1;\n"
    assert folded(text, {"kZero": 1}) == in_function("  return x;") + "int next = 1;\n"
    assert "g();" in folded(text, {"kZero": 0})


def test_assertions_are_dropped() -> None:
    text = in_function('  static_assert(kA > 3, "(so) it is");', "  g();")
    assert folded(text, {}) == in_function("  g();")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = kA ? 3 : 4;", "x = 3;"),
        ("x = kB ? 3 : 4;", "x = 4;"),
        ("x = kB ? f(1, 2) : g(3, h[4]);", "x = g(3, h[4]);"),
        ("return kA ? F45::first(x) : 2;", "return F45::first(x);"),
        ("x = f(kA ? 1 : 2, kB ? 3 : 4);", "x = f(1, 4);"),
        ("x = kB ? 1 : y > 2 ? 3 : 4;", "x = y > 2 ? 3 : 4;"),
        ("x = y > 2 ? 3 : kB ? 1 : 2;", "x = y > 2 ? 3 : 2;"),
        ("x = y ? 1 : 2;", "x = y ? 1 : 2;"),
    ],
)
def test_choices(before: str, after: str) -> None:
    assert folded(in_function(f"  {before}"), {"kA": 1, "kB": 0}) == in_function(f"  {after}")


# ---- templates


def test_a_parameter_with_one_argument_is_settled() -> None:
    texts = [
        "template <class H, int kK>\nint rows(int x) {\n  return H::kM * kK + x;\n}\n",
        "int f() {\n  return rows<F45, 32>(1) + rows<F45, 64>(2);\n}\n",
    ]
    rows, f = without_settled_parameters(texts, {"F45"})
    assert rows == "template <int kK>\nint rows(int x) {\n  return F45::kM * kK + x;\n}\n"
    assert f == "int f() {\n  return rows<32>(1) + rows<64>(2);\n}\n"


def test_the_last_parameter_takes_the_template_along() -> None:
    texts = ["template <int kK>\nstruct Tile {\n  static constexpr int kRows = kK;\n};\n", "int f = Tile<8>::kRows;\n"]
    tile, f = without_settled_parameters(texts, set())
    assert tile == "struct Tile {\n  static constexpr int kRows = 8;\n};\n"
    assert f == "int f = Tile::kRows;\n"


def test_an_argument_that_is_a_parameter_elsewhere_waits_for_it() -> None:
    texts = [
        "template <class T>\nint inner() {\n  return T::kM;\n}\n",
        "template <class W>\nint outer() {\n  return inner<W>();\n}\n",
        "int f = outer<F43>();\n",
    ]
    inner, outer, f = without_settled_parameters(texts, {"F43"})
    assert inner == "int inner() {\n  return F43::kM;\n}\n"
    assert outer == "int outer() {\n  return inner();\n}\n"
    assert f == "int f = outer();\n"


def test_aliases_of_settled_types_are_replaced() -> None:
    text = "int f() {\n  using Sizes = Tile<F45>;\n  return Sizes::kRows + p.Sizes;\n}\n"
    assert without_aliases(text, {"Tile", "F45"}) == "int f() {\n  return Tile<F45>::kRows + p.Sizes;\n}\n"
    assert without_aliases(text, {"F45"}) == text


def test_parameters_in_a_line_of_their_own_are_no_declaration() -> None:
    text = """\
__device__ void add(float* sums,
                    const u32 (&first)[2], int units) {
  sums[0] += first[0] * units;
}
"""
    assert simplified(text, {}) == text
    assert without_unused(text, text) == text


def test_a_member_that_is_always_zero_is_replaced() -> None:
    block = "struct Block {\n  int tile, group;\n  Block(int n) {\n    tile = n;\n    group = 0;\n  }\n};\n"
    use = "int f(int n) {\n  const Block block(n);\n  return block.tile + block.group + other.group;\n}\n"
    assert without_zero_members([block, use]) == [
        "struct Block {\n  int tile;\n  Block(int n) {\n    tile = n;\n  }\n};\n",
        "int f(int n) {\n  const Block block(n);\n  return block.tile + 0 + other.group;\n}\n",
    ]
    counts = block.replace("tile = n;", "group += n;")
    assert without_zero_members([counts, use]) == [counts, use]


# ---- parameters


def test_fixed_parameters_are_numbers() -> None:
    text = "x = p.rows * p.columns + p.rows_all + q.rows;"
    assert with_fixed_parameters(text, {"rows": "5"}) == "x = 5 * p.columns + p.rows_all + q.rows;"


def test_quotients_by_numbers_are_divisions() -> None:
    text = "y = p.tiles.quotient(x + f(1)), z = x - y * int(p.tiles.divisor) * p.tiles.divisor;"
    assert with_fixed_parameters(text, {"tiles": "7"}) == "y = u32(x + f(1)) / 7, z = x - y * 7 * 7;"
    assert with_fixed_parameters("y = p.tiles.quotient(x);", {"tiles": "1"}) == "y = x;"


def test_nothing_is_left_by_a_division_by_one() -> None:
    text = "y = p.tiles.quotient(x), z = x - y * p.tiles.divisor, u = (x - int(y * p.tiles.divisor)) * 3;"
    assert with_fixed_parameters(text, {"tiles": "1"}) == "y = x, z = 0, u = (0) * 3;"
    assert with_fixed_parameters("z = place.x - y * p.tiles.divisor;", {"tiles": "1"}) == "z = 0;"


def test_assignments_to_fixed_parameters_are_dropped() -> None:
    """The remaining parameters fill their lines."""
    text = """\
  FillParams f{};
  f.rows = 3, f.columns = by(4), f.x = c.x;
  f.rows = g.rows = 5;
  GemmParams g{};
  g.rows = f.columns = 2;
  other.rows = 1;
"""
    assert (
        without_assignments(text, {"FillParams": {"rows": "3", "columns": "4"}})
        == """\
  FillParams f{};
  f.x = c.x, g.rows = 5;
  GemmParams g{};
  g.rows = 2;
  other.rows = 1;
"""
    )


# ---- formatting


def test_pragmas_stand_before_their_loop() -> None:
    assert with_pragmas_in_line("#pragma unroll\n    for (;;)\n") == "    UNROLL for (;;)\n"


def test_nobody_adds_nothing() -> None:
    assert tidied("x * 1 + 0 + 1 * y + 10 * 1.5f + 0.5f\n\n\n\nz") == "x + y + 10 * 1.5f + 0.5f\n\nz"


def test_long_lines_are_broken() -> None:
    long = f"  const int sum = {' + '.join(f'first[{i}] * second[{i}]' for i in range(9))};"
    lines = wrapped(long).split("\n")
    assert len(lines) > 1
    assert max(map(len, lines)) <= 120
    assert [len(line) - len(line.lstrip()) for line in lines] == [2] + [6] * (len(lines) - 1)
    assert "".join(wrapped(long).split()) == "".join(long.split())


def test_a_comment_that_makes_a_line_long_stands_above_it() -> None:
    code, comment = "  int x;", "words " * 19 + "and the last"
    assert wrapped(f"{code}  // {comment}") == f"  // {comment}\n{code}"
    assert wrapped(f"{code}  // short") == f"{code}  // short"


def test_copies_of_a_variable_are_substituted() -> None:
    text = in_function("  const u32 lane = x;", "  const int rest = lane;", "  return f(lane) - rest;")
    assert without_copies(text) == in_function("  return f(x) - x;")


def test_copies_that_matter_stay() -> None:
    """Of a variable that changes, and where the sign of the type does."""
    for use in ("  x++;\n  return copy;", "  return copy / 2;", "  return i64(copy);"):
        text = in_function("  const u32 copy = x;", use)
        assert without_copies(text) == text


def test_short_functions_and_constants_share_lines() -> None:
    text = """\
struct Size {
  u32 height;
  u32 width;
  int depth;
};
DEVICE int twice(int i) {
  return 2 * i;
}
static void both(int* to, int i) {
  const int first = twice(i);
  const int second = twice(first);
  const float other = 1.f;
  for (int n = 0; n < 2; n++) {
    to[n] = second;
  }
}
"""
    assert (
        compacted(text)
        == """\
struct Size {
  u32 height, width;
  int depth;
};
DEVICE int twice(int i) { return 2 * i; }
static void both(int* to, int i) {
  const int first = twice(i), second = twice(first);
  const float other = 1.f;
  for (int n = 0; n < 2; n++) {
    to[n] = second;
  }
}
"""
    )


def test_tables_of_one_element() -> None:
    fixed = {"taps": "5"}
    assert with_fixed_parameters("r < p.taps[w] && r < p.taps[0]", fixed) == "r < 5 && r < 5"
    text = "  OneParams f{};\n  for (int i = 0; i < 1; i++) {\n    f.taps[i] = kTaps[i].taps;\n  }\n  f.rows = 1;\n"
    assert without_assignments(text, {"OneParams": fixed}) == "  OneParams f{};\n  f.rows = 1;\n"
