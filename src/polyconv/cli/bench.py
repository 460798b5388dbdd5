"""``polyconv bench``: time and error next to PyTorch, of single passes, layers and whole networks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..measure import environment, workloads
from ..measure.environment import HUGE_PAGES
from ..measure.layers import SEED
from ..problem import Pass
from ..tools.bench.cases import Cases, Layout, Mode, Peer
from ..util.console import print_json, progress
from . import _options

if TYPE_CHECKING:
    from ..tools.bench.journal import Record
    from ..tools.bench.runner import Contest
    from ..tools.bench.suites import Suite

WORKLOADS = ("quick", "headline", "kernelbench", "models")
"""Suites of passes: groups of workloads."""
NETWORKS, LAYERS, ISSUES = "networks", "layers", "issues"
SAMPLE = 100

HOW = f"""\
how it is measured:

  Candidates run in turn, each round starting with another one, on the same threads and huge pages
  ({HUGE_PAGES}=1, for which the command starts itself once more). Times are the best of all rounds, and so are the
  ratios; the medians are in the JSON, and the processor time of all threads together.

  Workloads (quick, headline, kernelbench, models, or by name): polyconv's operators and PyTorch's, each on NCHW tensors
  and on channels_last tensors whose input, weight and gradient were converted beforehand. x NCHW and x ch.last compare
  in the same layout, x best each in its faster one. The forward pass runs in inference mode; of PyTorch's backward pass
  only the gradient that is asked for is computed. As in a model that serves, the weight is the same tensor in every
  call, so polyconv transforms it once and keeps the result. --fresh-weights gives it a new one each time.

  max error is the largest deviation from float64 in units of sqrt(products per output) * rms(input) * rms(weight)
  of each output map; of large layers a sample is compared. predicted is the plan's, in the same unit.

  x sgemm: multiply-adds of the direct method per second, relative to those of torch.mm on 1024x1024 matrices at the
  same number of threads. A fast algorithm does with fewer multiplications, so it may exceed 100 %.

  networks: whole networks with random weights (pip install 'polyconv[zoo]'; nothing is downloaded), before and after
  polyconv.replace, one image and batches of half as high and wide ones, a call in inference mode and a step of
  training: forward, backward, gradient descent. At batch 1, batch normalisation uses its running statistics, which are
  random, too. MB is the peak resident size of a process that runs that side alone; ! is more than 1.1 times PyTorch's
  and 256 MiB.

  networks with --peers: eager PyTorch in NCHW and in channels_last, the peers, polyconv.replace in both layouts and
  polyconv.optimize, each in a process of its own, asked in turn for one sample, so that no thread pool disturbs
  another. compile is torch.compile, in inference with freezing; aotinductor is a package of the exported network, with
  freezing, and a second one with polyconv's kernels; onnxruntime has all graph optimisations; openvino has the latency
  hint and float32 precision. The latter two read one ONNX file per network; these four do not train. error is the
  largest deviation from float64 relative to the rms of the output (in training, of all gradients), setup s the time
  from the module to the first result (export, compilation, autotuning), MB the peak resident size of the process, in
  which PyTorch is always loaded. A/A compares the even rounds of a contender with its odd ones. of the best peer is the
  best time of all others, eager PyTorch included, over the best of polyconv's.

  layers: every distinct Conv2d of 100 networks of timm at their own image size, module against module, called and
  trained; a sample drawn with --seed, of which a smaller one is the beginning of a larger. lost ms is processor time,
  counted for every convolution of those networks that is this one.

  issues: layers that public issues report as slow, wrong or growing on the CPU, each named by one of them, in the
  reported precision, NCHW and batch unless --layout says otherwise; a training step only of layers that are trained.
  Denormal weights are 1e-40 times ordinary ones. error is the largest deviation from float64 (of a training step, of
  the gradients) in units of the rounding of the layer's dtype at the scale of the output map, for PyTorch and for
  polyconv. MB is as for networks. Two layers are called once with each of 5,000 lengths, each side in a process of its
  own: ms is the mean of a call, MB the resident size at the end.

  --benchmark: what runs is not the cost model's choice but that of an autotuning session in the first calls, which
  are not timed: polyconv.benchmark(True).

  --enable: polyconv's side is PyTorch's module called under polyconv.enable(), which reaches subclasses and functions.

  A/A is PyTorch against itself, in the same rounds: what a ratio is worth on this machine at this moment.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    _options.add_workloads_argument(what, "workloads or groups, separated by commas: W1,resnet50-3b")
    what.add_argument(
        "--suite",
        choices=[*WORKLOADS, LAYERS, ISSUES, NETWORKS],
        default="quick",
        help="quick: four small layers, a minute or so; the others take from minutes to hours (default: quick)",
    )
    parser.add_argument(
        "--only",
        metavar="WORDS",
        type=_options.list_of(str),
        default=(),
        help="those of the suite that have one of these words in their name; of layers, in their class, too: "
        "resnet,depthwise; of networks, family: those with convolutions over one axis or three, or transposed; "
        "enabled: those whose convolutions replace does not reach",
    )
    _options.add_device_argument(parser, ["cpu"], "cpu", "where to run")
    _options.add_isa_argument(parser)
    _options.add_pass_argument(parser)
    parser.set_defaults(passes=None)
    _options.add_words_argument(parser, "--mode", "modes", Mode, about="of networks and layers: ")
    _options.add_words_argument(parser, "--layout", "layouts", Layout, about="of networks and layers: ")
    about = "of networks: measure them beside these graph compilers, pip install 'polyconv[peers]': "
    _options.add_words_argument(parser, "--peers", "peers", Peer, about=about, without="none")
    parser.add_argument(
        "--threads",
        metavar="N",
        type=_options.list_of(_options.positive),
        help="a number of threads, or several: 1,2 (default: as many as PyTorch takes)",
    )
    parser.add_argument(
        "--repeats", metavar="N", type=_options.positive, default=7, help="rounds of all candidates (default: 7)"
    )
    parser.add_argument(
        "--batch",
        metavar="N",
        type=_options.list_of(_options.positive),
        help="images: of workloads, at most (default: as many as stay below 40e9 multiply-adds per call and fit into "
        "memory); of networks and layers, a number or several (default: 1,8)",
    )
    parser.add_argument(
        "--sample", metavar="N", type=_options.positive, help=f"layers to draw from all of them (default: {SAMPLE})"
    )
    parser.add_argument("--seed", metavar="N", type=int, help=f"of the draw (default: {SEED})")
    parser.add_argument("--fresh-weights", action="store_true", help="a new weight tensor in every call of ours")
    parser.add_argument(
        "--benchmark",
        action="store_true",
        help="of networks and layers: autotune polyconv first, with polyconv.benchmark, until all choices are made",
    )
    parser.add_argument(
        "--enable",
        action="store_true",
        help="of networks: call PyTorch's module under polyconv.enable(), instead of replacing its layers",
    )
    parser.add_argument(
        "--seconds", metavar="N", type=_options.positive, help="start no further contest after this many seconds"
    )
    _options.add_json_argument(parser, "the rows, with medians and notes,")
    _options.add_output_argument(parser, "write the same JSON to a file, while it is measured")
    parser.add_argument(
        "--resume", action="store_true", help="take up the run that wrote the output file: measure what it lacks"
    )
    plot = parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the ratios (.png, .svg or .pdf)")
    _options.completes(plot, _options.FILES)
    _options.add_examples(
        parser,
        "polyconv bench",
        "polyconv bench W1 --batch 1 --pass fprop",
        "polyconv bench --suite models --threads 1,2 -o bench.json --plot bench.png",
        "polyconv bench --suite networks --only resnet,unet --mode inference --threads 1",
        "polyconv bench --suite networks --only family --batch 1 --threads 1",
        "polyconv bench --suite networks --benchmark",
        "polyconv bench --suite networks --only enabled --enable --batch 1 --threads 1",
        "polyconv bench --suite networks --peers compile,onnxruntime,openvino --batch 1 --threads 1 -o peers.json",
        "polyconv bench --suite issues --threads 1 --only bf16,pt#27971",
        "polyconv bench --suite layers --sample 400 --isa avx2 --seconds 3600 -o layers.json --resume",
        about=HOW,
    )


def run(args: argparse.Namespace) -> int:
    _check(args)
    _options.set_up("bench", environment.wanted(args.isa), args.isa)
    from ..cpu import native

    if not native.is_available():
        print("polyconv bench: no native kernels in this installation, PyTorch's run for ours, too", file=sys.stderr)
    from ..tools.bench import charts, journal

    try:
        if args.plot:
            charts.require(args.plot)
        suite = _suite(args)
        known = [suite.read(row) for row in journal.earlier(args.output, suite.name)] if args.resume else []
    except (charts.PlotError, journal.RecordError) as error:
        raise _options.UsageError(str(error)) from error
    rows = journal.Record(args.output, suite.name, known)
    done = {row.key for row in known}
    ahead = [contest for contest in suite.contests if contest.key not in done]
    _announce(suite, ahead)
    complete = _measure(ahead, args.seconds, rows)
    if args.json:
        print_json(rows.as_json())
    if rows.rows:
        threads = tuple(dict.fromkeys(_threads(args)))
        where = journal.in_words(journal.setting(), threads)
        if not args.json:
            suite.show(rows.rows, where)
        if args.plot:
            charts.draw(suite.panels(rows.rows), args.plot, suite.legend, where, suite.title)
    for failure in rows.failures:
        print(f"polyconv bench: {failure.key}: {failure.reason}", file=sys.stderr)
    return 130 if not complete else 1 if rows.failures else 0


def _suite(args: argparse.Namespace) -> Suite[Any]:
    """Requested suite. Raises :class:`~polyconv.cli._options.UsageError` if nothing matches or a package is missing."""
    from ..tools.bench import model_zoo, suites
    from ..tools.bench.passes import Options

    batches = args.batch or (1, 8)
    modes, layouts = args.modes or tuple(Mode), args.layouts or tuple(Layout)[: 1 if args.suite == ISSUES else 2]
    cases = Cases(modes, layouts, batches, _threads(args), args.repeats, args.benchmark, args.enable)
    try:
        if _passes_run(args):
            batch = args.batch[0] if args.batch else None
            options = Options(args.passes or tuple(Pass), _threads(args), args.repeats, batch, args.fresh_weights)
            return suites.of_passes(_names(args), workloads.find(_names(args)), options, args.only)
        if args.peers:
            return suites.of_peers(cases, args.only, args.peers)
        if args.suite == NETWORKS:
            return suites.of_networks(cases, args.only)
        if args.suite == ISSUES:
            return suites.of_issues(cases, args.only)
        return suites.of_layers(cases, args.only, args.sample or SAMPLE, SEED if args.seed is None else args.seed)
    except (suites.NothingError, model_zoo.ZooError) as error:
        raise _options.UsageError(str(error)) from error


def _passes_run(args: argparse.Namespace) -> bool:
    return args.workloads is not None or args.suite in WORKLOADS


def _names(args: argparse.Namespace) -> str:
    return str(args.suite if args.workloads is None else args.workloads)


def _threads(args: argparse.Namespace) -> tuple[int, ...]:
    import torch

    return args.threads or (torch.get_num_threads(),)


def _measure(contests: Sequence[Contest[Any]], seconds: float | None, rows: Record) -> bool:
    """Run the contests. Returns False after Ctrl-C, which keeps the rows measured so far."""
    from ..tools.bench.runner import Failure, run

    done = 0
    try:
        with progress() as shown:
            shown.expect(len(contests))
            for found in run(contests, seconds):
                rows.add(found)
                done += 1
                ended = "failed" if isinstance(found, Failure) else f"{found.headline:.2f}x"
                shown.step(f"{found.key}: {ended}")
    except KeyboardInterrupt:
        return False
    finally:
        rows.write()
    if done < len(contests):
        print(f"polyconv bench: {done} of {len(contests)} contests in {seconds} seconds", file=sys.stderr)
    return True


# ---- arguments


def _check(args: argparse.Namespace) -> None:
    """Reject options that do not apply to the suite."""
    if _passes_run(args):
        given = {"--mode": args.modes, "--layout": args.layouts, "--benchmark": args.benchmark}
        where = "networks and layers"
        workloads.find(_names(args))
        if args.batch and len(args.batch) > 1:
            raise _options.UsageError("workloads take one --batch: the number of images, at most")
    else:
        given = {"--pass": args.passes, "--fresh-weights": args.fresh_weights}
        where = "workloads"
        if args.suite == ISSUES and args.batch:
            raise _options.UsageError("--batch: not for issues, whose layers have the batch of the report")
    wrong = [name for name, value in given.items() if value]
    if args.suite != LAYERS or args.workloads is not None:
        sampling = [name for name, value in (("--sample", args.sample), ("--seed", args.seed)) if value is not None]
        if sampling:
            wrong, where = sampling, "layers"
    if wrong:
        raise _options.UsageError(f"{' and '.join(wrong)}: for {where} only")
    if args.peers:
        _check_peers(args)
    if args.enable and (args.suite != NETWORKS or args.workloads is not None or args.peers):
        raise _options.UsageError("--enable: for networks only, and not with --peers")
    if args.resume and args.output is None:
        raise _options.UsageError("--resume needs the file of the run that is taken up: -o FILE")
    _options.check_writable(args.output, args.plot)


def _check_peers(args: argparse.Namespace) -> None:
    if args.suite != NETWORKS or args.workloads is not None:
        raise _options.UsageError("--peers: for networks only")
    given = {"--layout": args.layouts, "--benchmark": args.benchmark}
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise _options.UsageError(f"{' and '.join(wrong)}: not with --peers, which choose for themselves")


# ---- output


def _announce(suite: Suite[Any], ahead: Sequence[Contest[Any]]) -> None:
    """Print the number of contests. The progress display estimates the time after the first one."""
    names = ", ".join(suite.subjects[:4]) + (f" and {len(suite.subjects) - 4} more" if suite.subjects[4:] else "")
    known = len(suite.contests) - len(ahead)
    rest = f", of which {known} are measured" if known else ""
    print(
        f"polyconv bench: {names}; {len(suite.contests)} contests{rest}. Ctrl-C ends it and keeps what was measured",
        file=sys.stderr,
        flush=True,
    )
