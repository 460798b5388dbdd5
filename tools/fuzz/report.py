"""The final report: a table of the parts, then every kind of failure with its reproduction."""

from __future__ import annotations

from collections.abc import Iterator

from .journal import Found, PartJournal
from .runner import Campaign


def summary(campaign: Campaign) -> str:
    """Totals and failures, including earlier runs with the same journal."""
    parts = campaign.journals.values()
    width = max([len("part"), *(len(journal.part) for journal in parts)])
    lines = [f"{'part':<{width}}  {'cases':>9}  {'failures':>8}  {'kinds':>5}  {'seconds':>8}"]
    for journal in parts:
        lines.append(
            f"{journal.part:<{width}}  {journal.cases:>9,}  {len(journal.failures):>8,}  {len(journal.alike()):>5,}  "
            f"{journal.seconds:>8,.0f}"
        )
    lines += [f"\n{part} was skipped: {why}" for part, why in campaign.skipped.items()]
    lines += [f"\n{part} could not be used: {why}" for part, why in campaign.broken.items()]
    for journal in parts:
        for alike in journal.alike().values():
            lines += ["", *_told(journal, alike)]
    return "\n".join(lines)


def _told(journal: PartJournal, alike: list[Found]) -> Iterator[str]:
    first, *others = alike
    yield f"=== {journal.part}:{first.index} {first.kind}"
    if others:
        named = ", ".join(str(failure.index) for failure in others[:12])
        yield f"    and {len(others)} more like it: {named}{', ...' if len(others) > 12 else ''}"
    script = journal.script(first.index)
    yield f"    {script}:"
    yield ""
    yield script.read_text() if script.exists() else first.words
