"""Name and model of a processor from files and commands of other machines than this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyconv.util import cpuinfo
from polyconv.util.cpuinfo import processor_model, processor_name

NEOVERSE = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU variant\t: 0x0\nCPU part\t: {}\n\n"
XEON = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Intel(R) Xeon(R)\n\n"


@pytest.fixture(autouse=True)
def _nothing_cached() -> Iterator[None]:
    cpuinfo._brand.cache_clear()
    yield
    cpuinfo._brand.cache_clear()


@pytest.mark.parametrize(
    ("text", "name", "model"),
    [
        (NEOVERSE.format("0xd0c"), "Neoverse N1", "ARM 0x41 0xd0c"),
        (NEOVERSE.format("0xd4f") + NEOVERSE.format("0xd0c"), "Neoverse V2", "ARM 0x41 0xd4f"),
        (NEOVERSE.format("0xfff"), "ARM 0x41 0xfff", "ARM 0x41 0xfff"),
        (XEON, "Intel(R) Xeon(R)", "GenuineIntel 6 207"),
        ("processor\t: 0\n\n", "CPU", "? ? ?"),
    ],
)
def test_linux(tmp_path: Path, text: str, name: str, model: str) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert (processor_name(path), processor_model(path)) == (name, model)


def test_a_mac_is_asked_for_its_brand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "sysctl"
    command.write_text('#!/bin/sh\n[ "$*" = "-n machdep.cpu.brand_string" ] && echo Apple M1\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "darwin")
    absent = tmp_path / "absent"
    assert (processor_name(absent), processor_model(absent)) == ("Apple M1", "Apple M1")


def test_without_any_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (processor_name(tmp_path / "absent"), processor_model(tmp_path / "absent")) == ("CPU", "? ? ?")
