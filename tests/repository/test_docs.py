"""The documentation is correct: its Python runs, its commands parse, quoted messages exist, figures are current.

Blocks of a page run in order in one namespace. A block's output is compared with a following block titled "prints". A
block titled "needs a GPU" does not run; one titled with a file's name quotes that file.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RUN = (
    DOCS / "index.md",
    DOCS / "accuracy.md",
    DOCS / "audit.md",
    DOCS / "compatibility.md",
    DOCS / "other-tools.md",
    DOCS / "reference" / "settings.md",
    *sorted((DOCS / "recipes").glob("*.md")),
)
"""Pages whose Python is for the reader to run."""
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
GPU = "needs a GPU"
_BLOCK = re.compile(
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]*)\")?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    language: str
    title: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    return [
        Block(m["language"], m["title"] or "", m["text"], source[: m.start()].count("\n") + 2)
        for m in _BLOCK.finditer(source)
    ]


def run(page: Path, found: list[Block], namespace: dict[str, object]) -> None:
    """Every Python block, with tracebacks that name the page and line."""
    for number, block in enumerate(found):
        if block.language != "python" or block.title:
            continue
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if number + 1 < len(found) and found[number + 1].title == "prints":
            assert printed.getvalue() == found[number + 1].text


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A reader's settings (shipped profiles) in an empty folder, and one process for torch.distributed."""
    from polyconv import settings

    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    with settings.use(profile=None):
        yield


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(DOCS)))
def test_python_of_a_page_runs(page: Path) -> None:
    run(page, blocks(page), {"__name__": "__main__"})


def test_python_of_the_readme_runs() -> None:
    """On smaller images than the README's."""
    found = [block._replace(text=block.text.replace("512, 512", "64, 80")) for block in blocks(ROOT / "README.md")]
    assert sum(block.language == "python" for block in found) >= 3
    run(ROOT / "README.md", found, {})


def test_what_does_not_run_says_so() -> None:
    """A Python block with a title needs a GPU or quotes a file."""
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python" and block.title != GPU and block.title:
                path = block.title.partition(",")[0]
                assert (ROOT / path).is_file(), f"{page}:{block.line} quotes {path}"


def test_quoted_code_is_that_of_the_file() -> None:
    """Line by line, in the file's order; … stands for omissions."""
    quoted = 0
    for page in PAGES:
        for block in blocks(page):
            path = ROOT / block.title.partition(",")[0]
            if block.language != "python" or not block.title or not path.is_file():
                continue
            source = iter(path.read_text(encoding="utf-8").splitlines())
            for number, line in enumerate(block.text.splitlines()):
                if line.strip() in ("", "…"):
                    continue
                assert line in source, f"{page.relative_to(ROOT)}:{block.line + number}: not in {path.name}: {line!r}"
                quoted += 1
    assert quoted > 20


def selections() -> Iterator[tuple[str, list[str]]]:
    """Every ``pytest … -k WORD`` of a page."""
    for page in PAGES:
        for line in re.findall(r"pytest [^`\n#]*-k [\w]+", page.read_text(encoding="utf-8")):
            yield str(page.relative_to(ROOT)), shlex.split(line)[1:]


def test_words_after_k_select_tests() -> None:
    """In the named files; a file skipped as a whole, for lack of native kernels, is ignored."""
    wanted = list(selections())
    assert len(wanted) > 3
    files = sorted({word for _, arguments in wanted for word in arguments if word.startswith("tests/")})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "POLYCONV_NIGHTLY": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    names = [line.partition("::") for line in done.stdout.splitlines() if "::" in line]
    for page, arguments in wanted:
        asked, word = [one for one in arguments if one in files], arguments[arguments.index("-k") + 1]
        skipped = all(f"] {one}:" in done.stdout for one in asked)
        found = any(path in asked and word in name for path, _, name in names)
        assert found or skipped, f"{page}: pytest {shlex.join(arguments)} selects no test"


def test_files_that_are_named_exist() -> None:
    """Every path of this repository, in any page."""
    spelt = re.compile(r"\b(?:benchmarks|csrc|docs|examples|src|tests|tools)/[\w./-]+\.(?:cc|cuh|h|json|md|py)\b")
    missing = {
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        for path in spelt.findall(page.read_text(encoding="utf-8"))
        if not any((folder / path).exists() for folder in (ROOT, ROOT / "src" / "polyconv"))
    }
    assert not missing, missing


def test_links_work_in_the_repository() -> None:
    """As GitHub follows them, from the page's folder; the built site is checked by mkdocs (.ci/build_docs)."""
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\((?![a-z]+:|#)([^()\s#]+)", prose):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every ``polyconv`` command in shell blocks, sentences and tables."""
    for page in PAGES:
        text = re.sub(r"^`.*\n(?=:   )", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)  # quoted messages
        lines = [
            line
            for block in blocks(page)
            if block.language in ("", "bash")
            for line in block.text.replace("\\\n", " ").splitlines()
        ]
        inline = re.findall(r"`(polyconv [^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
        for line in [*lines, *(" ".join(one.split()) for one in inline)]:
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if len(words) > 1 and words[0] == "polyconv" and not {"…", "COMMAND", "--version"} & set(words):
                yield str(page.relative_to(ROOT)), words[1:]


def test_commands_parse() -> None:
    from polyconv import cli

    found = list(commands())
    assert len(found) > 20
    for page, (command, *rest) in found:
        assert command in cli.COMMANDS, f"{page}: there is no command polyconv {command}"
        if not rest:  # a sentence that mentions the command
            continue
        try:
            cli.command_parser(command).parse_args(rest)
        except SystemExit as end:
            if end.code:
                pytest.fail(f"{page}: polyconv {command} {shlex.join(rest)} is not understood")


def messages() -> Iterator[str]:
    """Every string of the package and of an exported file, with ``…`` for inserted values."""
    for path in [*(ROOT / "src" / "polyconv").rglob("*.py"), ROOT / "examples" / "model.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_that_are_explained_exist() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    terms = re.findall(r"^(`[^\n]*)\n:   ", page, re.MULTILINE)
    quoted = [quote for term in terms for quote in re.findall(r"`([^`]+)`", term)]
    assert len(quoted) > 40
    known = "\n".join(messages())
    parts = [part.strip(" ':;,=.") for quote in quoted for part in quote.split("…")]
    unknown = [part for part in parts if part not in known]
    assert not unknown, f"no message of the package has these words: {unknown}"


def test_figures_are_current() -> None:
    stale = runpy.run_path(str(DOCS / "figures" / "draw.py"))["stale"]()
    assert not stale, f"python docs/figures/draw.py draws anew: {', '.join(path.name for path in stale)}"


def test_figures_come_in_pairs() -> None:
    """Each figure is on its page for both colour schemes, in a form that GitHub and the site know."""
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        light = re.findall(r"figures/([\w-]+)-light\.svg#gh-light-mode-only", text)
        dark = re.findall(r"figures/([\w-]+)-dark\.svg#gh-dark-mode-only", text)
        assert light == dark, page
        assert len(re.findall(r"!\[", text)) == len(light) + len(dark), page
