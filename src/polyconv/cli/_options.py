"""Arguments that several subcommands take."""

from __future__ import annotations

import argparse

from ..problem import Pass


def add_pass_argument(parser: argparse.ArgumentParser) -> None:
    """``--pass``: some of the three passes, all by default, as ``args.passes``."""
    parser.add_argument(
        "--pass",
        dest="passes",
        metavar="PASSES",
        type=_passes,
        default=tuple(Pass),
        help="fprop, dgrad, wgrad, separated by commas (default: all)",
    )


def _passes(text: str) -> tuple[Pass, ...]:
    try:
        return tuple(dict.fromkeys(Pass(part.strip()) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(map(str, Pass))}") from None
