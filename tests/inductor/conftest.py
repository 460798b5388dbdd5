"""What tests of compiled graphs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config

from polyconv import settings
from polyconv.runtime import warn_once


@pytest.fixture
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was compiled, measured or said before. No graph is read from disk: tests replace what its key lacks."""
    monkeypatch.setattr(warn_once, "_said", {})
    torch._dynamo.reset()
    with settings.use(cache_dir=tmp_path, tuning_file=None), torch._inductor.config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()
