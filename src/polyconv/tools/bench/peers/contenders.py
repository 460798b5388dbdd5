"""Contenders: eager PyTorch, its peers at their best documented settings, and polyconv.

All compute in float32, with the same number of threads. A contender that cannot run a network raises
:class:`RefusedError`, or any other exception, with its words.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ....inductor import aoti
from ....measure import environment
from ....model import replace as replacement
from ...optimize import optimize
from ..ab_compare import block, prepared
from ..ab_suites import made, network_call
from ..cases import Case, Layout, Mode, Peer
from ..model_zoo import Network

EAGER, EAGER_CHANNELS_LAST = "eager", "eager channels_last"
REPLACE, REPLACE_CHANNELS_LAST, OPTIMIZE = "polyconv.replace", "replace channels_last", "polyconv.optimize"
BACKEND, PACKAGE = "compile, backend polyconv", "aotinductor, polyconv"
OURS = (REPLACE, REPLACE_CHANNELS_LAST, OPTIMIZE, BACKEND, PACKAGE)
EXPORTED = (Peer.ONNXRUNTIME, Peer.OPENVINO)
"""Peers that read the exported network."""
NETWORK, INPUT, ONNX = "network.pickle", "input.pt", "network.onnx"
"""Files of a contest, in its folder."""


class RefusedError(RuntimeError):
    """A contender cannot run a network; the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a contender's process is to run."""

    contender: str
    case: Case
    folder: Path
    """Has the files of the contest."""
    isa: str = ""
    """Instruction set of polyconv's kernels; libraries are limited to it by the variables of the process."""

    def made(self) -> tuple[nn.Module, Tensor]:
        network: Network = pickle.loads((self.folder / NETWORK).read_bytes())
        return made(network, self.case)


@dataclass(frozen=True, slots=True)
class Ready:
    """A contender's call, and the result of its first one."""

    call: Callable[[], object]
    result: Tensor
    """The output; in training, all gradients in one vector."""
    block: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context that every call is made in."""


def names(peers: Sequence[Peer], axes: int) -> list[str]:
    """Contenders for a network of a number of spatial axes, in the order of the tables. Signals have one layout."""
    without = set() if axes > 1 else {EAGER_CHANNELS_LAST, REPLACE_CHANNELS_LAST}
    if Peer.AOTINDUCTOR not in peers:
        without.add(PACKAGE)
    return [name for name in (EAGER, EAGER_CHANNELS_LAST, *map(str, peers), *OURS) if name not in without]


def versions(peers: Sequence[Peer]) -> str:
    """Names of the peers, followed by their versions where they are packages separate from PyTorch."""
    found = [f"{peer} {_version(peer) or '(not installed)'}" if peer in EXPORTED else str(peer) for peer in peers]
    return ", ".join(found)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def refusal(job: Job) -> str:
    """Why a contender cannot run at all, or nothing."""
    if job.case.mode is Mode.TRAINING and job.contender in (*EXPORTED, Peer.AOTINDUCTOR, PACKAGE):
        return "inference only"
    if job.contender not in EXPORTED:
        return ""
    if job.contender == Peer.ONNXRUNTIME and environment.is_limited():
        return "not limited: ONNX Runtime has no setting for the instruction set"
    return "" if _version(job.contender) else "not installed: pip install 'polyconv[peers]'"


def source(job: Job) -> tuple[Any, Tensor]:
    """What a contender starts from: the module, or the name of the exported file; and the input."""
    if job.contender in EXPORTED:
        return str(job.folder / ONNX), torch.load(job.folder / INPUT)
    return job.made()


def build(job: Job, origin: Any, x: Tensor) -> Ready:
    """Build a contender, and call it once."""
    return _BUILDERS[job.contender](origin, x, job.case)


# ---- PyTorch and polyconv


def eager(
    module: nn.Module,
    x: Tensor,
    case: Case,
    layout: Layout = Layout.NCHW,
    change: Callable[[nn.Module, Tensor], object] | None = None,
) -> Ready:
    """The network as it is, or changed in place."""
    module, x = prepared(module, x, replace(case, layout=layout))
    if change is not None:
        change(module, x)
    return _called(module, x, case.mode, module, partial(block, case.mode))


def _compiled(module: nn.Module, x: Tensor, case: Case) -> Ready:
    """``torch.compile``, in inference with frozen weights, which Inductor then folds and prepacks."""
    config: Any = import_module("torch._inductor.config")
    config.freezing = case.mode is not Mode.TRAINING
    return _compiled_by("inductor", module, x, case)


def _compiled_by(backend: str, module: nn.Module, x: Tensor, case: Case) -> Ready:
    module, x = prepared(module, x, case)
    if case.mode is Mode.TRAINING:
        return _called(module, x, case.mode, torch.compile(module, backend=backend), torch.enable_grad)
    # A served network does not change, so its modules need not be checked in every call: 0.5 ms in MobileNetV2.
    options: Any = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    compiled = torch.compile(module, backend=backend, options=options)
    # Not inference mode, for which freezing is not documented.
    return _called(module, x, case.mode, compiled, torch.no_grad)


def _packaged(module: nn.Module, x: Tensor, case: Case, options: Callable[[], Mapping[str, Any]]) -> Ready:
    """A package of AOTInductor, as a program that serves the network loads it."""
    module, x = prepared(module, x, case)
    inductor: Any = import_module("torch._inductor")
    with torch.no_grad(), TemporaryDirectory() as folder:
        exported = torch.export.export(module, (x,))
        path = inductor.aoti_compile_and_package(
            exported, package_path=f"{folder}/network.pt2", inductor_configs=dict(options())
        )
        package = inductor.aoti_load_package(path)
    return _called(module, x, case.mode, package, torch.no_grad)


def _called(
    module: nn.Module,
    x: Tensor,
    mode: Mode,
    compiled: Callable[[Tensor], Tensor],
    within: Callable[[], AbstractContextManager[object]],
) -> Ready:
    with within():
        call = network_call(module, x, mode, compiled)
        result = call()
    if mode is Mode.TRAINING:
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        result = torch.cat([gradient.flatten() for gradient in gradients])
    assert isinstance(result, Tensor)
    return Ready(call, result, within)


def _replaced(module: nn.Module, x: Tensor) -> None:
    replacement.replace(module)


def _optimized(module: nn.Module, x: Tensor) -> None:
    optimize(module, x, quiet=True)


# ---- peers that read an exported network


def export(job: Job) -> None:
    """Write the network as ONNX, by the older exporter where the one of ``torch.export`` fails."""
    module, x = prepared(*job.made(), job.case)
    failures = []
    for newer in (True, False):
        try:
            with redirect_stdout(sys.stderr):  # standard output may be JSON
                torch.onnx.export(module, (x,), job.folder / ONNX, dynamo=newer, verbose=False)
            return
        except Exception as error:  # exporters raise whatever they meet
            failures.append(in_brief(error))
    raise RefusedError(f"not exported: {'; '.join(failures)}")


def _onnxruntime(path: str, x: Tensor, case: Case) -> Ready:
    ort = import_module("onnxruntime")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads, options.inter_op_num_threads = case.threads, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")  # threads spin during a call, not after it
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return _of_arrays(lambda: session.run(None, feed)[0])


def _openvino(path: str, x: Tensor, case: Case) -> Ready:
    core, array = import_module("openvino").Core(), x.numpy()
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": case.threads}
    request = core.compile_model(core.read_model(path), "CPU", hints).create_infer_request()
    return _of_arrays(lambda: request.infer([array], share_inputs=True, share_outputs=True)[0])


def _of_arrays(call: Callable[[], Any]) -> Ready:
    return Ready(call, torch.from_numpy(call().copy()))


def in_brief(error: BaseException) -> str:
    """Type and first line of an exception's text; of a refusal its words."""
    if isinstance(error, RefusedError):
        return str(error)
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


_BUILDERS: dict[str, Callable[[Any, Tensor, Case], Ready]] = {
    EAGER: eager,
    EAGER_CHANNELS_LAST: partial(eager, layout=Layout.CHANNELS_LAST),
    Peer.COMPILE: _compiled,
    Peer.ONNXRUNTIME: _onnxruntime,
    Peer.OPENVINO: _openvino,
    REPLACE: partial(eager, change=_replaced),
    REPLACE_CHANNELS_LAST: partial(eager, layout=Layout.CHANNELS_LAST, change=_replaced),
    OPTIMIZE: partial(eager, change=_optimized),
    Peer.AOTINDUCTOR: partial(_packaged, options=lambda: {"freezing": True}),
    BACKEND: partial(_compiled_by, "polyconv"),
    PACKAGE: partial(_packaged, options=aoti.options),
}
