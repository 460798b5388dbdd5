"""A module changes between and during calls: every result equals float64's for the module's current state."""

import copy
import gc
import io
import pickle
import random
import sys
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import polyconv
from polyconv.autotune import preferences
from polyconv.backend import backend_for, candidate_names

KINDS = {
    "small": ("Conv2d", (4, 6, 3), {"padding": 1}, (1, 4, 10, 11)),
    "square": ("Conv2d", (16, 24, 3), {"padding": 1}, (2, 16, 20, 20)),
    "wide": ("Conv2d", (32, 32, 3), {"padding": 1}, (1, 32, 32, 32)),
    "long": ("Conv2d", (8, 8, (5, 9)), {"padding": (2, 4)}, (1, 8, 20, 30)),
    "depthwise": ("Conv2d", (8, 8, 5), {"padding": 2, "groups": 8}, (2, 8, 19, 23)),
    "pointwise": ("Conv2d", (32, 16, 1), {}, (2, 32, 9, 9)),
    "signal": ("Conv1d", (8, 8, 7), {"padding": 3}, (2, 8, 60)),
    "volume": ("Conv3d", (4, 4, 3), {"padding": 1}, (1, 4, 6, 8, 8)),
    "transposed": ("ConvTranspose2d", (8, 6, 3), {"padding": 1}, (1, 8, 14, 14)),
}


class Subject:
    """The changed module, its input, and what polyconv was promised about it."""

    def __init__(self, kind, seed):
        torch.manual_seed(seed)
        name, sizes, moves, shape = KINDS[kind]
        self.module = getattr(polyconv, name)(*sizes, **moves)
        self.x = torch.randn(shape)
        self.frozen = None  # a weight for which freeze() was called
        self.others = []  # copies, and modules that were copied

    @property
    def is_frozen(self):
        """True if its weight must not be written behind the version counter."""
        return self.frozen is not None and self.frozen is self.module._parameters.get("weight")

    @property
    def has_weight(self):
        """True if its weight is a parameter, not recomputed before each call."""
        return "weight" in self.module._parameters

    def new(self, name="weight"):
        """Values like a parameter's, and others."""
        now = getattr(self.module, name)
        return torch.randn_like(now.detach()) if now is not None else torch.randn(self.module.out_channels)


def exact(module, x):
    """Result of torch.nn's forward for a module in its current state, in float64."""
    w, bias = module.weight.double(), None if module.bias is None else module.bias.double()
    if module.transposed:
        numbers = module.stride, module.padding, module.output_padding, module.groups, module.dilation
        return F.conv_transpose2d(x.double(), w, bias, *numbers)
    torchs = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(module.kernel_size)]
    y = torchs._conv_forward(module, x.double(), w, bias)
    activation = getattr(module, "activation", None) if isinstance(module, polyconv.nn.Convolution) else None
    return y if activation is None else {"relu": F.relu, "silu": F.silu}[activation](y)


def excess(got, wanted):
    """Error relative to the largest element."""
    if got.shape != wanted.shape:
        return float("inf")
    strays = (got.detach().double() - wanted.detach()).abs().max() / wanted.detach().abs().max().clamp(min=1e-30)
    return float(strays.nan_to_num(float("inf")))


def allowed(module):
    """Limit of direct summation, if nothing else may run."""
    return 1e-5 if getattr(module, "tolerance", None) == 0 else 3e-4


def hold(what, off, limit, after):
    """Fail with a last line that is equal for all attributes set in the same way."""
    if off > limit:
        details = f"after {after}: {what} strays by {off:.1e} of the largest element, where {limit:g} is allowed"
        raise AssertionError(f"{details}\n{what} is not that of the module as it is, after {after.split(', set')[-1]}")


def compare(module, x, training, after):
    if not training:
        with torch.no_grad():
            hold("y", excess(module(x), exact(module, x)), allowed(module), after)
        return
    x = x.clone().requires_grad_()
    leaves = {"x": x, **{name: p for name, p in module.named_parameters() if p.requires_grad}}
    y, wanted = module(x), exact(module, x)
    hold("y", excess(y, wanted), allowed(module), after)
    dy = torch.randn(wanted.shape)
    got = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype), allow_unused=True)
    right = torch.autograd.grad(wanted, list(leaves.values()), dy.double(), allow_unused=True)
    for name, mine, theirs in zip(leaves, got, right, strict=True):
        assert (mine is None) == (theirs is None), f"after {after}: one gradient of {name} is None"
        # A ReLU near zero may go either way: then one pixel's share of a gradient differs.
        loose = 0.05 if getattr(module, "activation", None) == "relu" else 1e-3
        hold(f"the gradient of {name}", 0.0 if mine is None else excess(mine, theirs.double()), loose, after)


# ---- attributes: values, and ways to set them


def an_extent(module, numbers, chance):
    return tuple(chance.choice(numbers) for _ in module.kernel_size)


VALUES = {
    "stride": lambda m, c: an_extent(m, [1, 2], c),
    "padding": lambda m, c: an_extent(m, [1, 2], c),
    "dilation": lambda m, c: (1,) * len(m.kernel_size) if m.transposed else an_extent(m, [1, 2], c),
    "padding_mode": lambda m, c: "zeros" if m.transposed else c.choice(["reflect", "replicate", "circular"]),
    "activation": lambda m, c: None if m.transposed else c.choice([None, "relu", "silu"]),
    "tolerance": lambda m, c: c.choice([None, 0, 1e-5, 1e-3]),
}


PATCHED = []
"""Classes with a property that hides an attribute."""


def set_by_setattr(module, name, value):
    setattr(module, name, value)


def set_in_dict(module, name, value):
    module.__dict__[name] = value


def set_by_object(module, name, value):
    object.__setattr__(module, name, value)


def set_by_state(module, name, value):
    module.__setstate__({**module.__dict__, name: value})


def set_by_update(module, name, value):
    vars(module).update({name: value})


def set_in_class(module, name, value):
    """A property of the class takes precedence over attributes of the module."""
    PATCHED.append((type(module), name))
    setattr(type(module), name, settled(name, value))


def set_by_another_class(module, name, value):
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: settled(name, value)})


def settled(name, value):
    """A property that hides an attribute which may still be set."""
    return property(lambda self: value, lambda self, hidden: self.__dict__.__setitem__(name, hidden))


WAYS = {
    way.__name__: way
    for way in (
        set_by_setattr,
        set_in_dict,
        set_by_object,
        set_by_state,
        set_by_update,
        set_in_class,
        set_by_another_class,
    )
}


def attribute(name, way):
    """A change of one attribute. Padding is two of them in torch, which reads one or the other."""

    def change(subject, chance):
        module = subject.module
        WAYS[way](module, name, VALUES[name](module, chance))
        if name == "padding":
            module.__dict__["_reversed_padding_repeated_twice"] = [n for n in module.padding[::-1] for _ in range(2)]

    return change


def groups(way):
    """With a matching weight."""

    def change(subject, chance):
        module = subject.module
        if not subject.has_weight:
            return
        most = next(n for n in (4, 2, 1) if not module.in_channels % n and not module.out_channels % n)
        count = chance.choice([n for n in (1, 2, 4) if n <= most])
        shape = list(module.weight.shape)
        shape[1] = (module.out_channels if module.transposed else module.in_channels) // count
        WAYS[way](module, "groups", count)
        module.weight = nn.Parameter(torch.randn(shape))

    return change


# ---- weights: changes that a version counter sees, or another tensor


def parameter_set(subject, chance):
    name = chance.choice(["weight", "bias"])
    if subject.has_weight:
        setattr(subject.module, name, nn.Parameter(subject.new(name)))


def parameter_in_dict(subject, chance):
    if subject.has_weight:
        subject.module._parameters["weight"] = nn.Parameter(subject.new())


def parameter_shadowed(subject, chance):
    """An attribute of the module takes precedence over its parameter of the same name."""
    name = chance.choice(["weight", "bias"])
    subject.module.__dict__[name] = subject.new(name)


def parameter_by_state(subject, chance):
    if subject.has_weight:
        state = vars(subject.module)
        parameters = {**state["_parameters"], "weight": nn.Parameter(subject.new())}
        subject.module.__setstate__({**state, "_parameters": parameters})


def bias_gone(subject, chance):
    subject.module.bias = None


def bias_back(subject, chance):
    subject.module.bias = nn.Parameter(torch.randn(subject.module.out_channels))


def loaded(assign, swapping=False):
    def change(subject, chance):
        if not subject.has_weight:
            return
        state = {name: torch.randn_like(value) for name, value in subject.module.state_dict().items()}
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(swapping)
        try:
            subject.module.load_state_dict(state, assign=assign)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return change


def swapped(subject, chance):
    torch.utils.swap_tensors(subject.module.weight, type(subject.module.weight)(subject.new()))


def data_replaced(subject, chance):
    subject.module.weight.data = subject.new()


def data_replaced_twice(subject, chance):
    """The second may be at the first tensor's address."""
    subject.module.weight.data = subject.new()
    subject.module.weight.data = subject.new()


def data_there_and_back(subject, chance):
    """Its memory with other values."""
    w = subject.module.weight
    before, shape = w.data, w.shape
    w.data = torch.empty(0)
    if chance.random() < 0.5:
        gc.collect()
    other = torch.randn(shape, dtype=before.dtype)
    if chance.random() < 0.5 and not subject.is_frozen:
        before.copy_(other)
        other = before
    else:
        del before
        other = other.clone()
    w.data = other


def written(subject, chance):
    with torch.no_grad():
        chance.choice([lambda w: w.neg_(), lambda w: w.copy_(subject.new()), lambda w: w[-1:].mul_(-2)])(
            subject.module.weight
        )


def set_to(subject, chance):
    with torch.no_grad():
        subject.module.weight.set_(subject.new())


def made_again(subject, chance):
    """Possibly the same id or address."""
    if not subject.has_weight:
        return
    shape, dtype = subject.module.weight.shape, subject.module.weight.dtype
    old = id(subject.module._parameters.get("weight"))
    subject.module.__dict__.pop("weight", None)
    for _ in range(20):
        subject.module._parameters.pop("weight", None)
        subject.module.weight = nn.Parameter(torch.randn(shape, dtype=dtype))
        if id(subject.module.weight) == old:
            break


def stepped(subject, chance):
    """An optimiser step on gradients that polyconv computed."""
    module, x = subject.module, subject.x
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return
    kind = chance.choice([torch.optim.SGD, torch.optim.Adam])
    # A fused step moves no version counter.
    how = {"fused": True} if not subject.is_frozen and chance.random() < 0.4 else {"foreach": chance.random() < 0.5}
    optimiser = kind(parameters, lr=0.1, **how)
    with torch.enable_grad():
        y = module(x)
        if not y.requires_grad:  # an attribute hides the only parameter
            return
        y.square().mean().backward()
    optimiser.step()
    optimiser.zero_grad()


def copied(subject, chance):
    """The copy is used from now on; the module stays unchanged."""
    other = copy.deepcopy(subject.module)
    subject.others, subject.module = [subject.module], other


def pickled(subject, chance):
    if type(subject.module) not in polyconv.nn.OURS.values():  # a class without an importable name
        return
    file = io.BytesIO()
    if chance.random() < 0.5:
        other = pickle.loads(pickle.dumps(subject.module))
    else:
        torch.save(subject.module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    subject.others, subject.module = [subject.module], other


def parametrised(subject, chance):
    """A weight that is recomputed before each call. torch refuses one hidden by an attribute."""
    hidden = "weight" in vars(subject.module)
    if subject.has_weight and not hidden and type(subject.module) in polyconv.nn.OURS.values():
        parametrize.register_parametrization(subject.module, "weight", Twice())


def unparametrised(subject, chance):
    # A copy of a parametrised module shares its class, from which torch takes the property; and torch refuses to
    # restore a parameter hidden by an attribute.
    hidden = "weight" in vars(subject.module)
    if type(subject.module).__module__ == parametrize.__name__ and not subject.others and not hidden:
        parametrize.remove_parametrizations(subject.module, "weight", leave_parametrized=chance.random() < 0.5)


class Twice(nn.Module):
    def forward(self, w):
        return 2 * w

    def right_inverse(self, w):
        return w / 2


def frozen(subject, chance):
    polyconv.freeze(subject.module)
    subject.frozen = subject.module._parameters.get("weight")


def unfrozen(subject, chance):
    polyconv.unfreeze(subject.module)
    subject.frozen = None


def replaced(subject, chance):
    polyconv.replace(subject.module)


def restored(subject, chance):
    polyconv.restore(subject.module)


def fixed(subject, chance):
    subject.module.requires_grad_(chance.random() < 0.5)


def with_threads(subject, chance):
    torch.set_num_threads(chance.choice([1, 2, 3, 4]))


def another_layout(subject, chance):
    if subject.x.dim() == 4:
        form = chance.choice([torch.channels_last, torch.contiguous_format])
        if chance.random() < 0.5:
            subject.module.to(memory_format=form)
        else:
            subject.x = subject.x.contiguous(memory_format=form)


def another_input(subject, chance):
    shape = list(subject.x.shape)
    shape[-1] += chance.choice([-1, 0, 1])
    shape[0] = chance.choice([1, 2])
    subject.x = torch.randn(shape)


OPEN = {f"{name}, {way}": attribute(name, way) for name in VALUES for way in WAYS}
"""One attribute each: a concurrent call sees the old one or the new one."""
OPEN |= {"loaded, assigned": loaded(True)}
for function in (parameter_set, parameter_in_dict, parameter_shadowed, parameter_by_state):
    OPEN[function.__name__] = function
for function in (replaced, restored, frozen, unfrozen):
    OPEN[function.__name__] = function

SEEN = {f"groups, {way}": groups(way) for way in WAYS if "class" not in way}
"""Changes whose end a call must see, but not their middle."""
SEEN |= {"loaded": loaded(False)}
SEEN |= {f"loaded{', assigned' * assign}, swapping": loaded(assign, True) for assign in (False, True)}
for function in (bias_gone, bias_back, data_replaced, data_replaced_twice, data_there_and_back, written, set_to):
    SEEN[function.__name__] = function
for function in (made_again, stepped, copied, pickled, parametrised, unparametrised, fixed, with_threads):
    SEEN[function.__name__] = function
for function in (another_layout, another_input, swapped):
    SEEN[function.__name__] = function


def hidden(write):
    """A write that no version counter sees: forbidden for a frozen weight."""

    def change(subject, chance):
        if not subject.is_frozen:
            write(subject, subject.module.weight)

    return change


def resized(subject, w):
    """As FSDP frees and fills a weight."""
    new, memory = subject.new(), w.untyped_storage()
    if memory.resizable():
        memory.resize_(0)
        memory.resize_(new.numel() * new.element_size())
        w.data.copy_(new)


HIDDEN = {
    "data negated": hidden(lambda s, w: w.data.neg_()),
    "data copied": hidden(lambda s, w: w.data.copy_(s.new())),
    "written by numpy": hidden(lambda s, w: w.detach().numpy().__imul__(-2)),
    "one number of data": hidden(lambda s, w: w.data.view(-1)[-1:].add_(1) if w.is_contiguous() else None),
    "written through another": hidden(lambda s, w: nn.Parameter(w.data).data.mul_(3)),
    "storage resized": hidden(resized),
}

CHANGES = {**OPEN, **SEEN, **HIDDEN}


# ---- in turn


def in_turn(kind, seed, training, trial, changes):
    """Changes, and calls between them. Each is a name and a seed."""
    torch.set_num_threads(1)
    subject = Subject(kind, seed)
    try:
        _in_turn(subject, training, trial, changes)
    finally:
        unpatch()


def unpatch():
    for kind, name in PATCHED:
        if name in vars(kind):
            delattr(kind, name)


def _in_turn(subject, training, trial, changes):
    with preferences.Forced(others_run(subject, training, trial)):
        for _ in range(2):
            compare(subject.module, subject.x, training, "nothing")
        for name, number in changes:
            torch.manual_seed(number)
            CHANGES[name](subject, random.Random(number))
            for module in (subject.module, subject.module, *subject.others):
                compare(module, subject.x, training, name)
            if name == "with_threads" and not training and not trial:
                follows_the_plan(subject)


def others_run(subject, training, trial):
    """Runs another candidate than the planner's choice."""
    with preferences.watched() as seen:
        compare(subject.module, subject.x, training, "nothing, watched")
    forced = {}
    for d in seen if trial else ():
        names = candidate_names(backend_for(torch.device("cpu")), d.problem, inference=d.inference)
        forced[d.key] = names[trial % len(names)]
    return forced


def follows_the_plan(subject):
    """Another number of threads may have a better plan: explain names the plan that runs, bit by bit."""
    with torch.no_grad():
        y = subject.module(subject.x)
        with preferences.watched() as seen:
            planned = subject.module(subject.x)
        text = str(polyconv.explain(subject.module, subject.x.shape))
    gc.collect()  # fake tensors hold weak references to parameters, which swap_tensors refuses
    assert all(d.choice in text for d in seen), f"explain names another plan than runs: {[d.choice for d in seen]}"
    assert torch.equal(y, planned), "after set_num_threads, another plan runs than explain names"


# ---- concurrently


def meanwhile(kind, seed, callers, switch, changes):
    """Threads call the module during changes: each result belongs to a state of the module during the call."""
    torch.set_num_threads(1)
    sys.setswitchinterval(switch)
    subject = Subject(kind, seed)
    module, x = subject.module, subject.x
    begun, done, over, seen, failed = [0], [0], threading.Event(), [], []

    def call():
        try:
            with torch.no_grad():
                while not over.is_set():
                    first = done[0]
                    y = module(x)
                    seen.append((first, begun[0], y))
                    if len(seen) > 40:
                        time.sleep(0.001)
        except BaseException as error:
            failed.append(error)

    with torch.no_grad():
        right = [exact(module, x)]
        limits = [allowed(module)]
        threads = [threading.Thread(target=call) for _ in range(callers)]
        for thread in threads:
            thread.start()
        try:
            for name, number in changes:
                torch.manual_seed(number)
                wait(lambda: len(seen) > 3 or failed)
                begun[0] += 1
                CHANGES[name](subject, random.Random(number))
                right.append(exact(module, x))
                limits.append(allowed(module))
                done[0] += 1
                judge(seen, right, limits, changes)
                wait(lambda: len(seen) > 2 * callers or failed)
                judge(seen, right, limits, changes)
                if failed:
                    raise failed[0]
        finally:
            over.set()
            for thread in threads:
                thread.join()
        judge(seen, right, limits, changes)
        if failed:
            raise failed[0]


def wait(condition):
    end = time.monotonic() + 5.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.0005)


def judge(seen, right, limits, changes):
    """Compare the results so far; no change is in progress."""
    for first, last, y in [seen.pop() for _ in range(len(seen))]:
        off, limit = min((excess(y, right[at]), limits[at]) for at in range(first, last + 1))
        after = changes[last - 1][0] if last else "nothing"
        hold(f"what a thread gets {'during a change' if first != last else 'then'}", off, limit, after)
