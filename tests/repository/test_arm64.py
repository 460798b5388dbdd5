"""The comparison of ARM64's results with those of SSE4 (``tools/arm64/bits.py``), here with SSE4 on both sides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from arm64 import bits
from cpu_passes import load_native, on_instruction_set
from polyconv.cpu import native
from polyconv.cpu.engines import channel_lanes, depthwise, pointwise, tile_lanes

load_native()


@pytest.fixture(autouse=True)
def sse4(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if native.instruction_set() == "neon":
        pytest.skip("a processor without SSE4")
    monkeypatch.setattr(bits, "PROBLEMS", 14)
    with on_instruction_set("sse4"):
        yield


def test_one_other_bit_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "digests.json"
    bits.write(file)
    found = json.loads(file.read_text())
    assert {name.rpartition(", ")[2] for name in found} >= {
        engine.NAME for engine in (tile_lanes, channel_lanes, pointwise, depthwise)
    }
    assert bits.compare(str(file)) == 0
    name = next(iter(found))
    file.write_text(json.dumps({**found, name: "0" * 64}))
    assert bits.compare(str(file)) == 1
    assert name in capsys.readouterr().out


def test_products_are_exact() -> None:
    """A fused multiply-add gives the same bits, except where lanes are added, whose number differs."""
    native.instruction_set("best")
    wide = bits.digests()
    native.instruction_set("sse4")
    narrow = bits.digests()
    assert wide.keys() == narrow.keys()
    others = [name for name in wide if wide[name] != narrow[name]]
    assert all("groups" in name for name in others)
