"""Threads, forks, interrupts: several of the actors below at a time, every result compared with float64."""

import faulthandler
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

import polyconv
from polyconv import settings
from polyconv.autotune import preferences
from polyconv.backend import backend_for

KINDS = {
    "square": ((2, 16, 20, 20), (24, 16, 3, 3), {"padding": 1}),
    "long": ((1, 8, 20, 30), (8, 8, 5, 9), {"padding": (2, 4), "dilation": (2, 3)}),
    "depthwise": ((2, 8, 19, 23), (8, 1, 5, 5), {"groups": 8, "padding": 2}),
    "pointwise": ((2, 32, 9, 9), (16, 32, 1, 1), {}),
    "strided": ((2, 9, 21, 22), (12, 9, 3, 3), {"stride": 2, "padding": 1}),
    "grouped": ((1, 12, 14, 14), (12, 6, 3, 3), {"groups": 2}),
    "pooled": ((1, 2, 1100, 1000), (4, 2, 3, 3), {}),
}


class Convolution:
    """A kind, with tensors and the exact results of all passes."""

    def __init__(self, kind, dtype=torch.float32):
        x_shape, w_shape, self.moves = KINDS[kind]
        generator = torch.Generator().manual_seed(sum(map(ord, kind)))
        self.x = torch.randn(x_shape, generator=generator).to(dtype).requires_grad_()
        self.w = torch.randn(w_shape, generator=generator).to(dtype).requires_grad_()
        self.bias = torch.randn(w_shape[0], generator=generator).to(dtype).requires_grad_()
        self.w_exact = self.w.detach().double()
        y = self._exact(self.x.double(), self.w.double(), self.bias.double())
        self.dy = torch.randn(y.shape, generator=generator).to(dtype)
        self.y = y.detach()
        self.gradients = torch.autograd.grad(y, (self.x, self.w, self.bias), self.dy.double())

    def _exact(self, x, w, bias):
        return F.conv2d(x, w, bias, **self.moves)

    def forward(self):
        check(polyconv.conv2d(self.x, self.w, self.bias, **self.moves), self.y)

    def inference(self):
        with torch.no_grad():
            check(polyconv.conv2d(self.x, self.w, self.bias, **self.moves), self.y)

    def backward(self):
        y = polyconv.conv2d(self.x, self.w, self.bias, **self.moves)
        got = torch.autograd.grad(y, (self.x, self.w, self.bias), self.dy)
        for gradient, exact in zip(got, self.gradients, strict=True):
            check(gradient, exact)

    def with_epilogue(self):
        with torch.no_grad():
            y = polyconv.conv2d(self.x, self.w, self.bias, **self.moves, activation="relu", residual=self.dy)
        check(y, F.relu(self.y + self.dy.double()))


def check(got, exact):
    excess = (got.detach().double() - exact).abs().max() / exact.abs().max()
    assert excess < 3e-4, f"strays by {float(excess)} of the largest element"


# ---- actions of a thread: a function of a kind and a random source returns one step


def plain(name):
    def make(kind, chance):
        convolution = Convolution(kind)
        return getattr(convolution, name)

    return make


def double(kind, chance):
    return Convolution(kind, torch.float64).backward


def module(kind, chance):
    """Modules come and go, with their cached weights."""
    convolution = Convolution(kind)

    def step():
        out_channels, in_channels, *kernel = convolution.w.shape
        moves = convolution.moves
        conv = polyconv.Conv2d(in_channels * moves.get("groups", 1), out_channels, kernel, **moves)
        with torch.no_grad():
            for _ in range(3):
                conv.weight.normal_()
                exact = F.conv2d(convolution.x.double(), conv.weight.double(), conv.bias.double(), **moves)
                check(conv(convolution.x), exact)
        if chance.random() < 0.2:
            gc.collect()

    return step


SHARED = {}
SHARED_LOCK = threading.Lock()


def shared(kind):
    with SHARED_LOCK:
        return SHARED.setdefault(kind, Convolution(kind))


def writer(kind, chance):
    """Writes a weight that others compute with."""
    convolution = shared(kind)

    def step():
        data = convolution.w.data
        data.mul_(chance.choice([-1.0, 2.0, 0.5]))
        data[chance.randrange(len(data))].normal_()
        data.copy_(convolution.w_exact)

    return step


def reader(kind, chance):
    """Computes with a weight that may be written meanwhile: any result, but no crash; the final one is correct."""
    convolution = shared(kind)

    def step():
        with torch.no_grad():
            polyconv.conv2d(convolution.x, convolution.w, convolution.bias, **convolution.moves)

    return step


def churn(kind, chance):
    """A thread per convolution: scratch memory comes and goes with it."""
    convolution = Convolution(kind)

    def step():
        failed = []
        thread = threading.Thread(target=guarded, args=(convolution.inference, failed))
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    return step


def fork(kind, chance):
    """A child as of a DataLoader: one thread, and convolutions of its own, possibly the first."""
    convolution = Convolution(kind)

    def step():
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                faulthandler.dump_traceback_later(25, exit=True)
                torch.set_num_threads(1)
                convolution.inference()
                convolution.backward()
                with polyconv.tolerance(0):
                    convolution.with_epilogue()
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        status = os.waitpid(pid, 0)[1]
        assert status == 0, "a forked child failed, or hung"
        time.sleep(chance.random() * 0.01)

    return step


def threads(kind, chance):
    return lambda: torch.set_num_threads(chance.choice([1, 2, 3]))


def tolerance(kind, chance):
    convolution = Convolution(kind)

    def step():
        with polyconv.tolerance(chance.choice([0, 1e-6, 1e-5, 1e-4])):
            convolution.forward()

    return step


def set_tolerance(kind, chance):
    return lambda: polyconv.set_tolerance(chance.choice([0, 1e-6, 1e-5, 1e-4]))


def low_precision(kind, chance):
    def step():
        with polyconv.allow_low_precision(chance.random() < 0.5):
            time.sleep(0)

    return step


def workspace(kind, chance):
    convolution = Convolution(kind)

    def step():
        with settings.use(workspace_bytes=chance.choice([0, 2**20])):
            convolution.inference()

    return step


def forced(kind, chance):
    """Requested candidates, as by the optimiser; for an unknown name the cost model decides."""
    convolution = Convolution(kind)

    def step():
        with preferences.Forced({"no such problem": "no such candidate"}):
            convolution.inference()
        with preferences.watched() as seen:
            convolution.forward()
        assert seen is not None

    return step


def pool(kind, chance):
    """The memory of large outputs is released and taken."""
    from polyconv.cpu import native

    large = Convolution("pooled")

    def step():
        native.operator("set_output_pool_limit")(chance.choice([0, 2**24, 2**30]))
        large.inference()

    return step


def collect(kind, chance):
    return gc.collect


def explain(kind, chance):
    convolution = Convolution(kind)
    in_channels = convolution.x.shape[1]
    conv = polyconv.Conv2d(in_channels, convolution.w.shape[0], convolution.w.shape[2:], **convolution.moves)
    return lambda: str(polyconv.explain(conv, convolution.x.shape))


def tuning(kind, chance):
    """A tuning file that is written while in use."""
    from polyconv.autotune import tuning_file as files

    convolution = Convolution(kind)
    path = Path(tempfile.mkdtemp()) / "tuning.json"
    environment = backend_for(torch.device("cpu")).environment()

    def step():
        entry = files.Entry("direct, tile lanes", {"direct, tile lanes": chance.random()}, 1.0)
        files.update(path, files.Tuning.of(environment, {str(chance.randrange(9)): entry}))
        with settings.use(tuning_file=(path,)):
            convolution.inference()

    return step


def optimize(kind, chance):
    convolution = Convolution(kind)

    def step():
        conv = torch.nn.Conv2d(
            convolution.x.shape[1], convolution.w.shape[0], convolution.w.shape[2:], **convolution.moves
        )
        exact = F.conv2d(convolution.x.double(), conv.weight.double(), conv.bias.double(), **convolution.moves)
        model = torch.nn.Sequential(conv).eval()
        with torch.no_grad():
            model, report = polyconv.optimize(model, convolution.x.detach(), candidates=2, quiet=True)
            check(model(convolution.x), exact)
            report.undo()
            check(model(convolution.x), exact)

    return step


ACTORS = {
    "forward": plain("forward"),
    "inference": plain("inference"),
    "backward": plain("backward"),
    "with_epilogue": plain("with_epilogue"),
    "double": double,
    "module": module,
    "writer": writer,
    "reader": reader,
    "churn": churn,
    "fork": fork,
    "threads": threads,
    "tolerance": tolerance,
    "set_tolerance": set_tolerance,
    "low_precision": low_precision,
    "workspace": workspace,
    "forced": forced,
    "pool": pool,
    "collect": collect,
    "explain": explain,
    "tuning": tuning,
    "optimize": optimize,
}


# ---- actors together


def guarded(step, failed):
    try:
        step()
    except BaseException as error:
        failed.append(error)


def again(step, rounds, failed, begin):
    begin.wait()
    for _ in range(rounds):
        if failed:
            return
        guarded(step, failed)


def finish(before, kinds):
    """No setting, choice, lock or wrong result remains."""
    assert not stay(before), f"settings stay behind: {stay(before)}"
    assert not preferences._forced.entries, "a forced choice stays behind"
    for convolution in SHARED.values():
        with torch.no_grad():
            convolution.w.data.copy_(convolution.w_exact)
    with torch.inference_mode(False), torch.enable_grad():  # Ctrl-C may leave these of torch's behind
        for convolution in [*SHARED.values(), *map(Convolution, kinds)]:
            convolution.inference()
            convolution.backward()
            convolution.with_epilogue()
            with polyconv.tolerance(0):
                convolution.inference()
    assert not stay(before), f"settings stay behind: {stay(before)}"


def stay(before):
    """Settings that differ from before."""
    now, then = settings.current().as_variables(), before.as_variables()
    return [f"{name}={now[name]}" for name in now if now[name] != then[name]]


def prepare(actors, seed):
    warnings.simplefilter("error", RuntimeWarning)
    torch.set_num_threads(1)
    chance = random.Random(seed)
    kinds = sorted({kind for _, kind in actors})
    # No polyconv convolution has run yet: the first ones are concurrent.
    return [ACTORS[name](kind, random.Random(chance.random())) for name, kind in actors], kinds


def together(actors, seed, rounds, switch=0.005):
    """All actors at the same time, each in a thread."""
    steps, kinds = prepare(actors, seed)
    before = settings.current()
    sys.setswitchinterval(switch)
    failed, begin = [], threading.Event()
    started = [threading.Thread(target=again, args=(step, rounds, failed, begin)) for step in steps]
    for thread in started:
        thread.start()
    begin.set()
    for thread in started:
        thread.join()
    if failed:
        raise failed[0]
    if any(name == "set_tolerance" for name, _ in actors):
        polyconv.set_tolerance(before.tolerance)
    finish(before, kinds)


def interrupted(actors, seed, rounds, longest):
    """Ctrl-C while the actors run one after another, after at most this many seconds each time."""
    steps, kinds = prepare(actors, seed)
    before, chance = settings.current(), random.Random(seed)
    came = False

    def interrupt(*_):
        nonlocal came
        came = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    for _ in range(rounds):
        came = False
        try:
            signal.setitimer(signal.ITIMER_REAL, max(chance.random() * longest, 1e-6))
            while not came:  # an exception in a weak reference's callback is ignored
                for step in steps:
                    step()
        except KeyboardInterrupt:
            pass
        except RuntimeError as error:
            # Python's own, when a thread is started: Condition.wait was interrupted before it had its lock again.
            if not isinstance(error.__context__, KeyboardInterrupt):
                raise
    signal.setitimer(signal.ITIMER_REAL, 0)
    finish(before, kinds)


def reentered(actors, seed, rounds, longest):
    """A signal handler that convolves, at any moment."""
    steps, kinds = prepare(actors, seed)
    before, chance = settings.current(), random.Random(seed)
    handled = Convolution(kinds[0])

    def handle(*_):
        handled.inference()
        with polyconv.tolerance(1e-5), torch.enable_grad():
            handled.backward()

    signal.signal(signal.SIGALRM, handle)
    for _ in range(rounds):
        signal.setitimer(signal.ITIMER_REAL, max(chance.random() * longest, 1e-6))
        for step in steps:
            step()
    signal.setitimer(signal.ITIMER_REAL, 0)
    finish(before, kinds)


def abandoned(actors, seed, seconds):
    """The interpreter exits while threads compute."""
    steps, _ = prepare(actors, seed)
    begin = threading.Event()
    for step in steps:
        threading.Thread(target=again, args=(step, 10**9, [], begin), daemon=True).start()
    begin.set()
    time.sleep(seconds)
