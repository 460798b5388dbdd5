"""Modules to export with ``--from``."""

from __future__ import annotations

from export_check.cases import KB82, RESNET
from polyconv import Conv2d

silu = Conv2d(**RESNET, activation="silu")
relu6 = Conv2d(**KB82, activation="relu6")
