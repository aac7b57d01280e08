"""The mutation tool changes the library in one place, and sees whether the tests notice."""

from __future__ import annotations

import ast
import json
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from proof.mutation.__main__ import ROOT, main
from proof.mutation.changes import changes_of, drawn
from proof.mutation.copies import Copy
from proof.mutation.touched import Touched
from proof.mutation.verdicts import Verdict, judge

RENEWAL = [each for each in changes_of(ROOT, ["fencelock/lock"]) if "renewal" in str(each.file)]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return folder


def edits(text: str, folder: Path) -> list[tuple[str, str, str]]:
    """Return the kind, the old and the new text of all changes of a program."""
    changes = changes_of(write(folder, "shop/code.py", text), ["shop"])
    return [(each.kind, each.before.strip(), each.after.strip()) for each in changes]


def test_a_draw_depends_on_the_seed_alone() -> None:
    """Of two changes the same goes first whatever else there is, so a draw outlives other work."""
    draw = drawn(RENEWAL, 50, seed=1)
    assert draw == drawn(reversed(RENEWAL), 50, seed=1)
    assert draw != drawn(RENEWAL, 50, seed=2)
    part = [each for each in RENEWAL if each.line > 100]
    assert [each for each in draw if each in part] == drawn(part, sum(each in part for each in draw), seed=1)


def test_each_change_is_another_program_with_as_many_lines() -> None:
    """So the lines that were measured, and tests that name lines, still fit."""
    for change in RENEWAL:
        text = (ROOT / change.file).read_bytes()
        changed = change.applied(text)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), change
        assert changed.count(b"\n") == text.count(b"\n"), change
        assert change.diff(text).startswith("-"), change
    assert len({change.identity for change in RENEWAL}) == len(RENEWAL)
    assert {change.kind for change in RENEWAL} == {
        *("arithmetic", "comparison", "condition", "constant", "logic", "statement")
    }


def test_a_change_keeps_its_identity_when_code_moves(tmp_path: Path) -> None:
    """Its file, its statement and the change itself make it."""
    old = "def f(a):\n    return a < 1\n"
    before = changes_of(write(tmp_path, "shop/code.py", old), ["shop"])
    after = changes_of(write(tmp_path, "shop/code.py", f"import os\n\n\n{old}"), ["shop"])
    assert [each.identity for each in before] == [each.identity for each in after]
    assert [each.line + 3 for each in before] == [each.line for each in after]


def test_a_change_of_another_file_is_refused(tmp_path: Path) -> None:
    """Rather than anything be changed in the wrong place."""
    change = changes_of(write(tmp_path, "shop/code.py", "LIMIT = 7\n"), ["shop"])[0]
    assert change.applied(b"LIMIT = 7\n") == b"LIMIT = 8\n"
    with pytest.raises(ValueError, match=r"shop/code\.py:1 does not read '7' any more"):
        change.applied(b"\nLIMIT = 7\n")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a <= b", [("comparison", "<=", "<")]),
        ("(a) is not (b)", [("comparison", ") is not (", ") is (")]),
        ("a not in b", [("comparison", "not in", "in")]),
        ("a < b == c", [("comparison", "<", "<="), ("comparison", "==", "!=")]),
        ("a and b and c", [("logic", "and b and", "or b or")]),
        ("(a  # or\n    or b)", [("logic", "# or\n    or", "# or\n    and")]),
        ("not (a or b)", [("condition", "not (a or b)", "(a or b)"), ("logic", "or", "and")]),
        ("a - b", [("arithmetic", "-", "+")]),
        ("a + 'b'", [("constant", "'b'", "'x'")]),
        ("[a for b in c if d(b)]", [("condition", "d(b)", "not (d(b))")]),
        ("a if b else c", [("condition", "b", "not (b)")]),
        ("1.5", [("constant", "1.5", "2.5")]),
        ("True", [("constant", "True", "False")]),
        ("'ab'", [("constant", "'ab'", "'xb'")]),
        ("b'x'", [("constant", "b'x'", "b'y'")]),
    ],
)
def test_kinds_of_changes(expression: str, expected: list[tuple[str, str, str]], tmp_path: Path) -> None:
    """An operator becomes its neighbour, a value another one; the statement is left out besides."""
    statement = f"return {expression}"
    assert edits(f"def f(a, b, c, d):\n    {statement}\n", tmp_path) == [
        ("statement", statement, "pass"),
        *expected,
    ]


def test_statements_that_are_left_out(tmp_path: Path) -> None:
    """Not the only one that gives a name its value, for any test would see that."""
    text = """
        def f(a):
            only = a()
            twice = only
            twice += only
            a.b = twice
            if only:
                raise ValueError
            while only:
                break
            assert only
            del a[only]
    """
    assert [before for kind, before, _ in edits(text, tmp_path) if kind == "statement"] == [
        *("twice = only", "twice += only", "a.b = twice", "raise ValueError", "break", "del a[only]")
    ]


def test_what_is_never_changed(tmp_path: Path) -> None:
    """Docstrings, types, lists of names, logs, and text that people read."""
    text = '''
        """Text"""
        from __future__ import annotations
        import logging
        from typing import TYPE_CHECKING, Literal, TypeVar, cast, overload
        if TYPE_CHECKING:
            from shop import other
            LIMIT = 1
        __all__ = ["f"]
        logger = logging.getLogger("shop")
        Kind = Literal["a", "b"]
        T = TypeVar("T", bound="Shop")
        class Shop:
            """Text"""
            __slots__ = ("a",)
            a: Literal[1]
            """Text"""
        @overload
        def f(a: int) -> Literal[1]: ...
        def f(a: Literal[1, "x"]) -> Literal[1]:
            """Text"""
            made: Literal[1]
            made = cast("Shop", a)
            logger.warning("text", 1)
            if made:
                raise ValueError("text", 1)
            for _ in zip(a, made, strict=True):
                a(ValueError("text"), f"text {a}", "two words")
    '''
    assert edits(text, tmp_path) == [
        ("condition", "made", "not (made)"),
        ("statement", 'raise ValueError("text", 1)', "pass"),
        ("statement", 'a(ValueError("text"), f"text {a}", "two words")', "pass"),
    ]


SETTINGS = """
    [pytest]
    addopts = --import-mode=importlib -p pytest_timeout
"""
PROGRAM = """
    START = 5

    def price(pieces):
        return pieces + START

    def same(value):
        return value + 0

    def untested(value):
        return not value
"""
TESTS = """
    import subprocess
    import sys

    import pytest

    from shop.code import price, same

    @pytest.mark.parametrize("pieces", [0, 1])
    def test_price(pieces):
        assert price(pieces) >= pieces

    def test_price_in_a_program():
        program = "from shop.code import price; print(price(2))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert price(0) and done.stdout == "7\\n"

    def test_same():
        assert same(1) == 1

    def test_that_fails_anyway():
        assert price(1) == 7
"""


@pytest.fixture
def _few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pytest start in half the time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.long
@pytest.mark.usefixtures("_few_plugins")
def test_tests_kill_a_change_and_let_an_equal_program_survive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real runs of pytest, in portions; the checkout stays as it is."""
    tree = write(tmp_path / "tree", "shop/code.py", PROGRAM)
    write(tree, "tests/test_code.py", TESTS)
    write(tree, "pytest.ini", SETTINGS)
    text = (tree / "shop" / "code.py").read_text()

    def portion(*options: str) -> str:
        assert main(["--tree", str(tree), "--scope", "shop", *options]) == 0
        return capsys.readouterr().out

    assert "1 files of tests are not measured yet" in portion("--minutes", "0")
    assert "failed: tests/test_code.py::test_that_fails_anyway" in portion("--measure")
    assert "wrote" in portion("--jobs", "2")

    known = [json.loads(line) for line in (tree / "runs/mutation/verdicts.jsonl").read_text().splitlines()]
    verdicts = {
        (each["line"], each["diff"].splitlines()[-1].strip("+ ")): (
            each["kind"],
            each["test"].partition("::")[2].partition("[")[0],  # either parameter may be the quicker one
        )
        for each in known
    }
    assert verdicts == {
        (2, "START = 6"): ("killed", "test_price_in_a_program"),
        (5, "pass"): ("killed", "test_price"),
        (5, "return pieces - START"): ("killed", "test_price"),
        (8, "pass"): ("killed", "test_same"),
        (8, "return value + 1"): ("killed", "test_same"),
        (8, "return value - 0"): ("survived", ""),
        (11, "pass"): ("not covered", ""),
        (11, "return value"): ("not covered", ""),
    }
    assert (tree / "shop" / "code.py").read_text() == text
    page = (tree / "runs/mutation/results.md").read_text()
    assert "| shop | 8 | 5 | 0 | 1 | 0 | 2 | 62.5% |" in page
    assert "shop/code.py:8, arithmetic" in page

    assert "survived" not in portion()
    judged = [line.split()[2] for line in portion("--again").splitlines()[:-1]]
    assert sorted(judged) == ["not", "not", "survived"]


@pytest.mark.long
@pytest.mark.usefixtures("_few_plugins")
def test_a_hang_sees_a_change_and_a_failure_that_is_not_its_own_does_not(tmp_path: Path) -> None:
    """Nothing is killed by a test that fails once, or without the change, too."""
    counter = tmp_path / "counter"
    counter.write_text("")
    program = """
        def down(n):
            while n:
                n -= 1
            return n

        def same(value):
            return value + 0
    """
    tests = f"""
        from pathlib import Path
        from shop.code import down, same

        def test_down():
            assert down(3) == 0

        def test_that_fails_in_its_second_run():
            counter = Path({str(counter)!r})
            counter.write_text(counter.read_text() + "x")
            assert same(1) == 1 and counter.read_text() != "xx"
    """
    tree = write(write(tmp_path / "tree", "shop/code.py", program), "tests/test_code.py", tests)
    write(tree, "pytest.ini", SETTINGS)
    touched = Touched(tree, tmp_path / "lines", ["shop"])
    copy = Copy(tree, tmp_path / "copy", patience=1)
    touched.measure("tests/test_code.py", copy)
    touched.load(["tests"])
    changes = {(each.line, each.kind): each for each in changes_of(tree, ["shop"])}

    def verdict(line: int, kind: str, most_seconds: float = 60) -> Verdict:
        return replace(judge(changes[line, kind], touched, copy, most_seconds), seconds=0)

    hung, unstable = "tests/test_code.py::test_down", "tests/test_code.py::test_that_fails_in_its_second_run"
    assert verdict(4, "statement") == Verdict("hung", hung, touching=1)
    assert verdict(8, "arithmetic") == Verdict("survived", touching=1, unstable=(unstable,))
    assert verdict(8, "arithmetic") == Verdict("survived", ran=1, touching=1)
    assert verdict(8, "arithmetic", most_seconds=0) == Verdict("survived", ran=0, touching=1)
    counter.unlink()
    assert verdict(8, "arithmetic") == Verdict("survived", touching=1, unstable=(unstable,))
    (copy.tree / "tests" / "test_code.py").write_text("import nothing_of_this_name")
    with pytest.raises(RuntimeError, match=r"shop/code\.py cannot be run at all:[^$]*nothing_of_this_name"):
        verdict(8, "arithmetic")
