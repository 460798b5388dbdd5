"""``polyconv tune``: measure the fastest candidates on this machine and write them into a tuning file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..measure import workloads
from ..measure.workloads import Workload
from ..problem import Pass
from ..util.console import print_json, print_table, progress
from ..util.tf32 import in_words
from . import INTERRUPTED, _options

if TYPE_CHECKING:
    from ..autotune.tuning_file import Tuning
    from ..measure.candidate_timing import Outcome

ABOUT = """\
The candidates that the cost model ranks first run in turn with PyTorch's convolution, on random numbers; the fastest
that is exact enough is written down. A forward pass is measured twice where that makes a difference: in inference,
where the transformed weight is kept between calls, and in training.

Without -o the result is merged into tuning.json in the cache's folder, where every process finds it. Another file is
used if POLYCONV_TUNING_FILE names it. A file may hold sections for several devices and versions; each process reads the
one that was measured where it runs. For the layers of a model, on its own data: polyconv.optimize(model, inputs,
tuning_file=FILE).
"""

HEADERS = ("workload", "pass", "batch", "choice", "PyTorch ms", "ours ms", "x PyTorch", "model's ms", "max error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _options.add_workloads_argument(parser, "workloads or groups of them, separated by commas: W1,resnet50-3b,models")
    merging = parser.add_argument("--merge", metavar="FILE", nargs="+", type=Path, help="merge tuning files into one")
    _options.completes(merging, _options.FILES)
    _options.add_pass_argument(parser)
    _options.add_device_argument(parser, ["cpu", "cuda"], "cpu", "where to measure")
    parser.add_argument("--candidates", metavar="N", type=_options.positive, default=3, help="to time (default: 3)")
    parser.add_argument(
        "--batch", metavar="N", type=_options.positive, help="images, at most (default: as polyconv bench)"
    )
    _options.add_output_argument(parser, "the tuning file to merge into (default: tuning.json in the cache's folder)")
    _options.add_json_argument(parser, "what was measured")
    _options.add_examples(
        parser,
        "polyconv tune W1 --pass fprop",
        "polyconv tune models -o tuning.json",
        "polyconv tune --merge server.json laptop.json -o tuning.json",
        about=ABOUT,
    )


def run(args: argparse.Namespace) -> int:
    if (args.workloads is None) == (args.merge is None):
        raise _options.UsageError("name either WORKLOADS to measure or files to --merge")
    _options.check_writable(args.output)
    return _merge(args) if args.merge is not None else _tune(args)


def _merge(args: argparse.Namespace) -> int:
    from ..autotune import tuning_file

    if args.output is None:
        raise _options.UsageError("--merge needs the file to write: -o FILE")
    try:
        merged = tuning_file.merge(tuning_file.load(path) for path in args.merge)
    except FileNotFoundError as error:
        raise _options.UsageError(f"there is no {error.filename}") from None
    written = tuning_file.update(args.output, merged)
    if args.json:
        print_json({"output": str(args.output), "sections": len(written.sections), "entries": len(written)})
    else:
        print(f"{args.output}: {written}")
    return 0


# ---- measurement


@dataclass(frozen=True)
class Measured:
    workload: Workload
    what: str
    """Pass, and for fprop inference or training."""
    batch: str
    outcome: Outcome
    torch_computes_in: str
    """PyTorch's format under the user's flags."""

    def as_json(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            "workload": self.workload.name,
            "pass": self.what,
            "batch": self.batch,
            "problem": outcome.key,
            **outcome.entry.as_json(),
            "model_choice": outcome.decision.choice,
            "max_error": outcome.error,
            "torch_max_error": outcome.torch_error,
            "torch_computes_in": self.torch_computes_in,
        }

    def cells(self) -> list[str]:
        entry, model = self.outcome.entry, self.outcome.decision.choice
        ours, theirs = self.outcome.seconds, entry.torch_seconds
        assert theirs is not None  # PyTorch's convolution is always timed
        milliseconds = [f"{theirs * 1e3:.4g}", f"{ours * 1e3:.4g}", f"{theirs / ours:.2f}"]
        modelled = f"{entry.seconds[model] * 1e3:.4g}" if model in entry.seconds else ""
        head = [self.workload.name, self.what, self.batch, entry.choice]
        return [*head, *milliseconds, modelled, f"{self.outcome.error:.1e}"]


def _tune(args: argparse.Namespace) -> int:
    import torch

    from ..autotune import tuning_file, tuning_lookup
    from ..backend import backend_for
    from ..measure.candidate_timing import InexactError

    chosen = workloads.find(args.workloads)
    path = args.output or tuning_lookup.default_file()
    _options.check_folder(path.parent, "name a file with -o")
    device = torch.device(args.device)
    measured: list[Measured] = []
    status = 0
    with progress() as shown:
        shown.expect(len(chosen) * len(args.passes))
        try:
            for workload, kind in ((w, kind) for w in chosen for kind in args.passes):
                try:
                    measured += _measure(workload, kind, device, args)
                except InexactError as error:  # continue with the other workloads
                    print(f"polyconv tune: {error}", file=sys.stderr)
                    status = 1
                shown.step(f"{workload.name} {kind}")
        except KeyboardInterrupt:  # keep the measurements so far
            status = INTERRUPTED
    if measured:
        found = tuning_file.Tuning.of(
            backend_for(device).environment(), {m.outcome.key: m.outcome.entry for m in measured}
        )
        _report(measured, path, tuning_file.update(path, found), as_json=args.json)
    return status


def _measure(workload: Workload, kind: Pass, device: Any, args: argparse.Namespace) -> Iterator[Measured]:
    """Measure the problems of one pass: two if the backend distinguishes inference from training."""
    from .. import settings
    from ..backend import backend_for
    from ..measure.batch_limits import available_memory, cut_batch, with_batch
    from ..measure.candidate_timing import Stopwatch, contest, decision_of
    from ..measure.operands import Operands
    from ..util import tf32

    batch = cut_batch(workload, args.batch, available_memory())
    problem = with_batch(workload, batch.images).problem(kind).as_2d()
    problem = replace(problem, tolerance=settings.current().tolerance)
    operands = Operands.random(problem, device=device)
    done: set[str] = set()
    twice = kind is problem.kind is Pass.FPROP
    for inference in (True, False) if twice else (False,):
        decision = decision_of(problem, operands, inference=inference)
        if decision.key not in done:
            done.add(decision.key)
            outcome = contest(
                decision, operands, backend_for(operands.x.device), Stopwatch(device), most=args.candidates
            )
            what = f"fprop, {'inference' if inference else 'training'}" if twice else str(kind)
            yield Measured(workload, what, str(batch), outcome, tf32.torchs_format(operands.x.device))


def _report(measured: Sequence[Measured], path: Path, written: Tuning, *, as_json: bool) -> None:
    if as_json:
        print_json([one.as_json() for one in measured])
        return
    cells = [one.cells() for one in measured]
    print_table("Time of one call, best of all rounds", HEADERS, cells, left=4, grouped=True)
    for other in dict.fromkeys(one.torch_computes_in for one in measured if one.torch_computes_in != "float32"):
        print(in_words(other))
    print(f"{path}: {written}")
