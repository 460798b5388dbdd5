"""Pages, and parts of pages, that are made of the package itself, so that they cannot fall behind it.

``<!-- generate: NAME -->`` on a page stands for what the function of that name in :data:`PARTS` returns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "src", ROOT / "docs" / "hooks"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import api  # noqa: E402
import command_line  # noqa: E402
import counted  # noqa: E402
import variables  # noqa: E402
from links import AT_ROOT  # noqa: E402

PARTS = {
    "api": api.markdown,
    "command line": command_line.markdown,
    "settings": variables.markdown,
    "counted": counted.markdown,
}


def on_files(files: Files, *, config: Any, **_: Any) -> Files:
    """Files at the root of the repository that are pages, too."""
    for page, path in AT_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the generated parts in their places."""
    for name, part in PARTS.items():
        mark = f"<!-- generate: {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, part())
    return markdown
