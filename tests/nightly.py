"""The switch for what takes too long, or depends too much on the machine, to run on every change."""

from __future__ import annotations

import os

import pytest

NIGHTLY = os.environ.get("POLYCONV_NIGHTLY", "") not in ("", "0")
"""``POLYCONV_NIGHTLY=1``: run everything."""

nightly = pytest.mark.skipif(not NIGHTLY, reason="runs at night: POLYCONV_NIGHTLY=1")
