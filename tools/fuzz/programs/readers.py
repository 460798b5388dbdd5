"""Code reads the tensor between a convolution and its activation: an optimised model must show it the same values."""

import copy
import ctypes
import gc
import io
import pickle
import threading
import warnings
import weakref

import numpy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import polyconv
from polyconv import settings
from polyconv.cpu import native
from polyconv.measure.timing import Timing

ACTIVATIONS = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "relu6": nn.ReLU6,
    "leaky_relu": lambda inplace: nn.LeakyReLU(0.25, inplace),
    "hardswish": nn.Hardswish,
}


class Model(nn.Module):
    """A convolution, a reader of its output, an activation, a second reader, another convolution."""

    def __init__(self, activation, in_place, readers):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.act = ACTIVATIONS[activation](in_place)
        self.last = nn.Conv2d(8, 4, 3)
        self.readers = readers
        self.handles = []
        self.clear()
        for reader in readers:
            if reader in SETUPS:
                SETUPS[reader](self)

    def clear(self):
        self.seen, self.kept = [], []

    def forward(self, x):
        y = self.conv(x)
        before = [reader for reader in self.readers if reader in BETWEEN]
        for reader in before:
            found = BETWEEN[reader](self, y)
            y = y if found is None else found
        z = self.act(y)
        for reader in self.readers:
            if reader in AFTER:
                found = AFTER[reader](self, y, z)
                z = z if found is None else found
        return self.last(z)

    def see(self, value):
        """Record what was read: tensors are copied, so that later writes do not count."""
        self.seen.append(torch.as_tensor(value).detach().clone().double())

    def look_again(self):
        """Kept tensors are read at the end."""
        for kept in self.kept:
            if isinstance(kept, torch.Tensor):
                self.see(kept)
                if (kept.is_leaf or kept.retains_grad) and kept.grad is not None:
                    self.see(kept.grad)


class Tagged(torch.Tensor):
    pass


# ---- between the two: may return another tensor to continue with


def read_by_thread(model, y):
    thread = threading.Thread(target=lambda: model.see(y.detach().sum((0, 2, 3))))
    thread.start()
    thread.join()


def read_by_address(model, y):
    if y.is_contiguous():
        memory = (ctypes.c_float * y.numel()).from_address(y.data_ptr())
        model.see(numpy.array(memory))


def read_by_set(model, y):
    model.see(torch.empty(0).set_(y.detach()))


def read_by_storage(model, y):
    memory = y.detach().untyped_storage()
    model.see(torch.empty(0).set_(memory, y.storage_offset(), y.shape, y.stride()))


def read_by_save(model, y):
    file = io.BytesIO()
    torch.save(y.detach(), file)
    file.seek(0)
    model.see(torch.load(file))


def kept_weakly(model, y):
    model.kept.append(y)
    ref = weakref.ref(y)
    model.see(ref())


def branched(model, y):
    """Python branches on one of its values."""
    return y * 2 if float(y.detach().amin()) < -1e-3 else y * 3


def retained(model, y):
    if y.requires_grad:
        y.retain_grad()
        model.kept.append(y)


def hooked(model, y):
    if y.requires_grad:
        y.register_hook(lambda gradient: model.see(gradient))


def prehooked(model, y):
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda gradients: model.see(gradients[0]))


def posthooked(model, y):
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda to, of: model.see(of[0]))


def changed_gradient(model, y):
    if y.requires_grad:
        y.register_hook(lambda gradient: 2 * gradient)


BETWEEN = {
    "multiplied": lambda m, y: m.see(y * 2),
    "summed": lambda m, y: m.see(y.sum((0, 2, 3))),
    "gone on with, multiplied": lambda m, y: y * 2,
    "gone on with, cloned": lambda m, y: y.clone(),
    "gone on with, viewed": lambda m, y: y.view(y.shape),
    "gone on with, detached": lambda m, y: y.detach() if not y.requires_grad else None,
    "added to": lambda m, y: y.add_(1.0),
    "added to through data": lambda m, y: y.data.add_(1.0) and None,
    "tolist": lambda m, y: m.see(y.tolist()),
    "item": lambda m, y: m.see(y[0, 0, 0, 0].item()),
    "float": lambda m, y: m.see(float(y.detach().mean())),
    "numpy": lambda m, y: m.see(y.detach().numpy()),
    "numpy.array": lambda m, y: m.see(numpy.array(y.detach())),
    "dlpack": lambda m, y: m.see(torch.from_dlpack(y.detach())),
    "repr": lambda m, y: m.see(len(repr(y.detach() < 0))),
    "copy.copy": lambda m, y: m.see(copy.copy(y)),
    "copy.copy, gone on with": lambda m, y: copy.copy(y),
    "copy.copy, kept": lambda m, y: m.kept.append(copy.copy(y)),
    "copy.deepcopy": lambda m, y: m.see(copy.deepcopy(y.detach())),
    "Parameter": lambda m, y: m.see(nn.Parameter(y)),
    "Parameter, kept": lambda m, y: m.kept.append(nn.Parameter(y)),
    "as_subclass": lambda m, y: m.see(y.as_subclass(Tagged)),
    "as_subclass, gone on with": lambda m, y: y.as_subclass(Tagged),
    "as_subclass, kept": lambda m, y: m.kept.append(y.as_subclass(Tagged)),
    "pickle": lambda m, y: m.see(pickle.loads(pickle.dumps(y.detach()))),
    "torch.save": read_by_save,
    "set_": read_by_set,
    "storage": read_by_storage,
    "data": lambda m, y: m.see(y.data),
    "data, kept": lambda m, y: m.kept.append(y.data),
    "address": read_by_address,
    "another thread": read_by_thread,
    "kept": lambda m, y: m.kept.append(y),
    "kept in a closure": lambda m, y: m.kept.append(y) or setattr(m, "read", lambda: y),
    "view kept": lambda m, y: m.kept.append(y[:, :2]),
    "detached, kept": lambda m, y: m.kept.append(y.detach()),
    "kept weakly": kept_weakly,
    "iterated": lambda m, y: [m.see(image) for image in y] and None,
    "branched": branched,
    "retain_grad": retained,
    "tensor hook": hooked,
    "tensor hook that changes": changed_gradient,
    "grad_fn prehook": prehooked,
    "grad_fn hook": posthooked,
}


# ---- after the activation: may return another tensor to continue with

AFTER = {
    "added after": lambda m, y, z: z + y,
    "read after": lambda m, y, z: m.see(y),
    "kept after": lambda m, y, z: m.kept.append(y),
    "activation again": lambda m, y, z: m.act(z + 0.1),
    "convolution again": lambda m, y, z: m.conv(z[:, :3]),
}


# ---- before the model runs: hooks


def on(kind, which, see):
    """A hook of a kind on a module, or on all of them."""

    def setup(model):
        module = {"conv": model.conv, "act": model.act, "model": model, "last": model.last}.get(which)
        if module is None:
            mine = {model.conv, model.act}
            register = getattr(nn.modules.module, f"register_module_{kind}")
            handle = register(lambda who, *values: see(model, *values) if who in mine else None)
        else:
            handle = getattr(module, f"register_{kind}")(lambda who, *values: see(model, *values))
        model.handles.append(handle)

    return setup


def see_all(model, *values):
    for value in values:
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, torch.Tensor):
                model.see(tensor)


def double_output(model, given, output):
    return output * 2


def wrapped(which):
    """A function in place of a module's forward, as some tools install it."""

    def setup(model):
        module = getattr(model, which)
        forward = module.forward

        def seeing(*given):
            output = forward(*given)
            model.see(output)
            return output

        module.forward = seeing

    return setup


def in_mode(mode):
    """A mode around the activation, which sees its input."""

    def setup(model):
        forward = model.act.forward

        def seeing(y):
            with mode(model):
                return forward(y)

        model.act.forward = seeing

    return setup


class SeeFunctions(TorchFunctionMode):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("relu", "silu", "relu_", "silu_"):
            with torch._C.DisableTorchFunction():
                self.model.see(args[0])
        return function(*args, **(kwargs or {}))


class SeeOperators(TorchDispatchMode):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.model.seen.append(args[0].detach().clone().double())
        return function(*args, **(kwargs or {}))


def saved_tensors(model):
    """Tensors that autograd saves for the activation and the next convolution pass through here."""
    forward = model.act.forward

    def packing(y):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: model.see(t) or t, lambda t: t):
            return forward(y)

    model.act.forward = packing


SETUPS = {
    f"{kind} of {which}": on(kind, which, see_all)
    for which in ("conv", "act", "all modules")
    for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    if (kind, which) != ("full_backward_pre_hook", "all modules")
}
SETUPS |= {
    "full_backward_pre_hook of all modules": on("full_backward_pre_hook", "all modules", see_all),
    "output doubled by a hook of conv": on("forward_hook", "conv", double_output),
    "forward of conv wrapped": wrapped("conv"),
    "forward of act wrapped": wrapped("act"),
    "function mode": in_mode(SeeFunctions),
    "dispatch mode": in_mode(SeeOperators),
    "saved tensors": saved_tensors,
}

READERS = [*BETWEEN, *AFTER, *SETUPS]


# ---- optimise, use, undo


def everything_is_faster(what, calls, within):
    """Runs each call once, in its state; polyconv's win."""
    for name, call in calls.items():
        with within[name]() if name in within else torch.no_grad():
            call()
    slow = ("PyTorch", "before", "before, again", "PyTorch's convolution, ATen")
    times = {name: 1.0 if name in slow else 0.4 if "fused" in name else 0.5 for name in calls}
    return {name: Timing(seconds, seconds) for name, seconds in times.items()}


def used(model, x, training):
    """Everything observable of a model's run: output, gradients, and its readers' values."""
    model.clear()
    x = x.clone().requires_grad_(training)
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(5)
    with torch.enable_grad() if training else torch.no_grad():
        y = model(x)
        if training:
            (y * torch.randn(y.shape)).sum().backward()
    model.look_again()
    shown = {"output": y.detach().double()}
    shown |= {f"what is read, {place}": seen for place, seen in enumerate(model.seen)}
    if training:
        shown |= {f"gradient of {name}": p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        shown |= {"gradient of x": x.grad.double()} if x.grad is not None else {}
    model.clear()
    return shown


def compare(found, right, when, exactly=False):
    names = [name.split(",")[0] for name in found]
    if found.keys() != right.keys():
        raise AssertionError(f"{when}: {[*found]}, not {[*right]}\nsomething else can be read of an optimised model")
    for name, mine in zip(names, found, strict=True):
        one, other = found[mine], right[mine]
        assert one.shape == other.shape, (
            f"{when}: {mine} has another shape\n{name} of an optimised model has another shape"
        )
        off = float((one - other).abs().max() / other.abs().max().clamp(min=1e-6)) if one.numel() else 0.0
        if not off <= (0.0 if exactly else 1e-3):
            what = "when it was undone" if exactly else "of an optimised model"
            raise AssertionError(f"{when}: {mine} strays by {off} of the largest\n{name} {what} is another")


def read(seed, activation, in_place, readers, optimised, then):
    """``optimised``: the mode; ``then``: the modes in which it is used afterwards, in order."""
    models = []
    try:
        # Without a profile polyconv's kernels are worth a try even on layers this small.
        with warnings.catch_warnings(), settings.use(profile="off"):
            warnings.simplefilter("ignore", UserWarning)  # of torch's, about hooks
            _read(models, seed, activation, in_place, readers, optimised, then)
    finally:
        for handle in (handle for model in models for handle in model.handles):
            handle.remove()


def _read(models, seed, activation, in_place, readers, optimised, then):
    torch.set_num_threads(1)
    while True:  # a ReLU near zero may go either way
        torch.manual_seed(seed)
        plain = Model(activation, in_place, [])
        x = torch.randn(2, 3, 10, 11)
        if float(plain.conv(x).detach().abs().min()) > 1e-4:
            break
        seed += 1
    torch.manual_seed(seed)
    plain = Model(activation, in_place, readers)
    torch.manual_seed(seed)
    model = Model(activation, in_place, readers)
    models += [plain, model]
    try:
        before = {training: used(plain, x, training) for training in (False, True)}
    except RuntimeError:  # not even torch's own takes these readers together
        return
    used(model, x, False)
    model.train(optimised == "training")
    classes = [type(module) for module in model.modules()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    model, report = polyconv.optimize(model, x, candidates=2, quiet=True, timer=everything_is_faster)
    try:
        assert report.swapped or not native.is_available(), f"{report}\nnothing was swapped"
        for mode in then:
            model.train(mode == "training")
            right = before[mode == "training"]
            compare(used(model, x, mode == "training"), right, f"optimised in {optimised}, in {mode}")
    finally:
        report.undo()
    gc.collect()
    assert [type(module) for module in model.modules()] == classes, "another class when it was undone"
    assert [sorted(vars(module)) for module in model.modules()] == attributes, "other attributes when it was undone"
    for training in (False, True):
        model.train(training)
        compare(used(model, x, training), before[training], "undone", exactly=True)
