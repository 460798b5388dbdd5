"""Commands that measure this machine as if it had a lesser processor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from ..bench import environment
from . import _options


def add_isa_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--isa",
        choices=list(environment.ISAS),
        help="limit PyTorch and polyconv to this instruction set, as on a processor that has no better one",
    )


def set_up(command: str, variables: Mapping[str, str], isa: str | None) -> None:
    """Start a command anew where variables have to be set before PyTorch is loaded; then limit our own kernels."""
    if variables and sys.argv[1:2] == [command]:  # and not a call of main() from another program
        environment.start_anew(variables)
    limits = {name: value for name, value in variables.items() if name != environment.HUGE_PAGES}
    if limits:
        setting = " ".join(f"{name}={value}" for name, value in limits.items())
        raise _options.UsageError(
            f"--isa {isa} has to be known before PyTorch is loaded; set {setting} and start again"
        )
    from ..cpu import native

    if isa is not None and native.is_available():
        native.instruction_set(isa)
