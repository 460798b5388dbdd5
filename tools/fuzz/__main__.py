"""Fuzzes polyconv: ``python tools/fuzz [PART ...] [--seconds N | --cases N]``.

Every part is an endless sequence of cases determined by the seed. Failures are pinned to a case, minimised, and printed
as programs. With --journal, a stopped run can be resumed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

if not __package__:  # started as a folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from fuzz.case import PARTS, load, names
from fuzz.journal import JournalError
from fuzz.process import ROOT, PartError, PartSkipped, Surroundings
from fuzz.report import summary
from fuzz.runner import Budget, Campaign


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    known = names(given.parts)
    if given.list:
        sys.path[1:1] = [str(ROOT / "src"), str(ROOT / "tests")]
        for name in known:
            print(f"{name:<16}{load(name, given.parts).ABOUT}")
        return 0
    chosen = [given.only[0]] if given.only else given.part or known
    unknown = [name for name in chosen if name not in known]
    if unknown:
        parser.error(f"no part {unknown[0]!r} in {given.parts}; there are {', '.join(known)}")
    surroundings = Surroundings(given.python, dict(given.env))
    folder = given.journal or Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        campaign = Campaign(given.parts, chosen, given.seed, folder, surroundings)
    except JournalError as error:
        parser.error(str(error))
    print(f"seed {given.seed}, journal in {folder}", flush=True)
    interrupted = False
    try:
        if given.only:
            part, indices = given.only
            print(campaign.replay(part, indices))
        else:
            seconds = 360.0 if given.seconds is None and given.cases is None else given.seconds
            campaign.run(Budget(seconds, given.cases), given.jobs)
    except (PartError, PartSkipped) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        interrupted = True
    print(f"\n{summary(campaign)}")
    if campaign.failed:
        return 1
    return 130 if interrupted else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tools/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", metavar="PART", help="default: all of them")
    parser.add_argument("--list", action="store_true", help="the parts, and what each tries to break")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--seconds", type=float, help="for all parts together; default: 360")
    budget.add_argument("--cases", type=int, help="of each part")
    budget.add_argument(
        "--only",
        type=_only,
        metavar="PART:INDEX",
        help="run one case, or FIRST-LAST in one worker, and print its script",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="workers at the same time; default: 1")
    parser.add_argument("--journal", type=Path, metavar="FOLDER", help="where to write, and to go on from")
    parser.add_argument("--parts", type=_folder, default=PARTS, metavar="FOLDER", help="where the parts are")
    parser.add_argument("--python", default=sys.executable, metavar="FILE", help="what runs the workers")
    parser.add_argument(
        "--env", type=_variable, action="append", default=[], metavar="NAME=VALUE", help="a variable for the workers"
    )
    return parser


def _only(text: str) -> tuple[str, range]:
    part, _, place = text.partition(":")
    first, _, last = place.partition("-")
    try:
        return part, range(int(first), int(last or first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected PART:INDEX or PART:FIRST-LAST, got {text!r}") from None


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _folder(text: str) -> Path:
    return Path(text).resolve()


if __name__ == "__main__":
    sys.exit(main())
