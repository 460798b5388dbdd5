"""Links that leave docs/: on GitHub they lead to a file of the repository, on the site there is no such file.

Where ``repo_url`` is set they lead to the repository. Where it is not, the words stay and the link goes, so that no
link of the site is ever dead. Pages that stand at the root of the repository (CONTRIBUTING.md) link into docs/ instead:
there the folder is taken off.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
logger = logging.getLogger("mkdocs.hooks.links")

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]+)\]\((?P<target>[^()\s]+)\)")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
AT_ROOT = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Page of the site -> the file at the root of the repository that it shows."""


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of one page, in its text but not in its code."""
    source = page.file.src_uri

    def rewrite(match: re.Match[str]) -> str:
        text, target = match["text"], match["target"]
        if re.match(r"[a-z]+:|#|/", target):
            return match[0]
        path, hash_sign, anchor = target.partition("#")
        folder = "" if source in AT_ROOT else posixpath.join("docs", posixpath.dirname(source))
        path = posixpath.normpath(posixpath.join(folder, path))
        pages = {root: shown for shown, root in AT_ROOT.items()}
        inside = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside is not None:
            here = posixpath.dirname(source) or "."
            return f"[{text}]({posixpath.relpath(inside, here)}{hash_sign}{anchor})"
        if not (ROOT / path).exists():
            logger.warning("%s links to %s, which is not in the repository", source, target)
        if not config.repo_url:
            return text
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{hash_sign}{anchor})"

    parts = _CODE.split(markdown)
    return "".join(part if number % 2 else _LINK.sub(rewrite, part) for number, part in enumerate(parts))
