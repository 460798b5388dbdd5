"""Networks of random layers, compiled with ``backend="polyconv"``: their results are those of PyTorch in float64."""

import copy
import warnings
from random import Random

import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.exc import InductorError

from polyconv import settings
from polyconv.autotune.elimination import Elimination
from polyconv.inductor import choice, swap

LEAST, MOST = 4, 48
"""Extents at which a network becomes no smaller, and no larger."""

ROUGH = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "hardtanh": lambda: nn.Hardtanh(-0.5, 2.0),
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "hardswish": nn.Hardswish,
}
"""Activations with points where a rounding error may change the derivative: not in training."""
SMOOTH = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu by tanh": lambda: nn.GELU("tanh"),
    "sigmoid": nn.Sigmoid,
    "nothing": nn.Identity,
}


class Network(nn.Module):
    """Steps that read one value, or several, and add another. A step without a value that suits it adds nothing."""

    def __init__(self, seed, steps, channels, size, smooth):
        super().__init__()
        self.activations = SMOOTH if smooth else {**SMOOTH, **ROUGH}
        self.parts, self.plan, self.shapes = nn.ModuleList(), [], [(channels, *size)]
        for place, name in enumerate(steps):
            self.chance = Random(f"{seed} {place} {name}")
            STEPS[name](self)

    def forward(self, x):
        values = [x]
        for function, reads, part in self.plan:
            arguments = [values[place] for place in reads]
            values.append(function(*arguments) if part is None else function(self.parts[part], *arguments))
        unread = set(range(len(values))) - {place for _, reads, _ in self.plan for place in reads}
        return [values[place] for place in sorted(unread)]

    # ---- for steps

    def pick(self, suits=lambda shape: True):
        """A value, one of the last ones if possible; None if there is none that suits."""
        able = [place for place, shape in enumerate(self.shapes) if suits(shape)]
        return None if not able else self.chance.choice([*able, *able[-2:], able[-1], able[-1]])

    def add(self, function, reads, part=None):
        """The step's value, whose shape is found by running it."""
        number = None
        if part is not None:
            self.parts.append(part)
            number = len(self.parts) - 1
        self.plan.append((function, reads, number))
        with torch.no_grad():
            arguments = [torch.zeros(2, *self.shapes[place]) for place in reads]
            value = function(*arguments) if part is None else function(copy.deepcopy(part).eval(), *arguments)
        self.shapes.append(tuple(value.shape[1:]))

    def activation(self):
        return self.activations[self.chance.choice([*self.activations])]()

    def layer(self, channels, outputs, kernel, active=True, **geometry):
        """A convolution, perhaps with batch normalisation and an activation behind it."""
        normalised, has_bias = self.chance.random() < 0.5, self.chance.random() < 0.6
        parts = [nn.Conv2d(channels, outputs, kernel, bias=has_bias, **geometry)]
        if normalised:
            parts.append(normalisation(outputs))
        return nn.Sequential(*parts, self.activation() if active else nn.Identity())


def normalisation(channels):
    norm = nn.BatchNorm2d(channels)
    for values in (norm.running_mean, norm.bias):
        values.detach().normal_()
    for values in (norm.running_var, norm.weight):
        values.detach().uniform_(0.5, 1.5)
    return norm


def call(part, *values):
    return part(*values)


def convolution(net):
    place = net.pick()
    channels, *size = net.shapes[place]
    kernel = tuple(net.chance.choice([(1, 1), (1, 1), (3, 3), (3, 3), (3, 3), (5, 5), (1, 3), (5, 1), (2, 2), (7, 7)]))
    dilation = tuple(net.chance.choice([1, 1, 1, 2]) for _ in kernel)
    padding = tuple((k - 1) * d // 2 for k, d in zip(kernel, dilation, strict=True))
    step = 2 if min(size) > 2 * LEAST and net.chance.random() < 0.25 else 1
    groups = net.chance.choice([g for g in (1, 1, 1, 2, 4) if channels % g == 0])
    outputs = groups * net.chance.choice([1, 2, 4, 8, 12, 16, 24])
    how = {"stride": step, "padding": padding, "dilation": dilation, "groups": groups}
    net.add(call, [place], net.layer(channels, outputs, kernel, **how))


def depthwise(net):
    place = net.pick()
    channels, *size = net.shapes[place]
    kernel = net.chance.choice([3, 3, 5, 7, 11])
    step = 2 if min(size) > 2 * LEAST and net.chance.random() < 0.3 else 1
    net.add(call, [place], net.layer(channels, channels, kernel, stride=step, padding=kernel // 2, groups=channels))


class Summed(nn.Module):
    """A layer, the addition of another value before or after it, and an activation."""

    def __init__(self, layer, activation, first):
        super().__init__()
        self.layer, self.activation, self.first = layer, activation, first

    def forward(self, x, other):
        y = self.layer(x)
        return self.activation(other + y if self.first else y + other)


def residual(net):
    """A layer of one value, added to another."""
    other = net.pick()
    channels, *size = net.shapes[other]
    place = net.pick(lambda shape: [*shape[1:]] == size)
    kernel = net.chance.choice([1, 3, 3])
    layer = net.layer(net.shapes[place][0], channels, kernel, active=False, padding=kernel // 2)
    net.add(call, [place, other], Summed(layer, net.activation(), net.chance.random() < 0.5))


def two_layers(net):
    """The sum of two layers, as at the end of a residual block with a projection."""
    place = net.pick()
    size = net.shapes[place][1:]
    other, outputs = net.pick(lambda shape: shape[1:] == size), net.chance.choice([8, 16, 20])
    one, two = (net.layer(net.shapes[at][0], outputs, 1, active=False) for at in (place, other))
    both = nn.ModuleList([one, two])
    net.add(lambda both, x, y: both[0](x) + both[1](y), [place, other], both)


class Inverted(nn.Module):
    """The block of MobileNet and EfficientNet."""

    def __init__(self, expand, across, gate, project, is_residual):
        super().__init__()
        self.expand, self.across, self.gate, self.project = expand, across, gate, project
        self.is_residual = is_residual

    def forward(self, x):
        y = self.across(self.expand(x))
        if self.gate is not None:
            y = y * self.gate(y.mean((2, 3), keepdim=True))
        y = self.project(y)
        return x + y if self.is_residual else y


def inverted(net):
    place = net.pick()
    channels, *size = net.shapes[place]
    wide, kernel = channels * net.chance.choice([1, 2, 3]), net.chance.choice([3, 5])
    step = 2 if min(size) > 2 * LEAST and net.chance.random() < 0.3 else 1
    outputs = net.chance.choice([channels, channels, 8, 24])
    gate = None
    if net.chance.random() < 0.5:
        squeezed = nn.Conv2d(wide, 4, 1), net.activation(), nn.Conv2d(4, wide, 1)
        gate = nn.Sequential(*squeezed, nn.Sigmoid() if net.chance.random() < 0.5 else nn.Hardsigmoid())
    across = net.layer(wide, wide, kernel, stride=step, padding=kernel // 2, groups=wide)
    parts = net.layer(channels, wide, 1), across, gate, net.layer(wide, outputs, 1, active=net.chance.random() < 0.3)
    net.add(call, [place], Inverted(*parts, step == 1 and outputs == channels))


def normalised_first(net):
    """A layer of DenseNet: batch normalisation and an activation before the convolution, of concatenated values."""
    place = net.pick()
    size = net.shapes[place][1:]
    places = [place, *[at for at, shape in enumerate(net.shapes) if at != place and shape[1:] == size][-2:]]
    channels = sum(net.shapes[at][0] for at in places)
    part = nn.Sequential(
        normalisation(channels), net.activation(), nn.Conv2d(channels, net.chance.choice([8, 12]), 1, bias=False)
    )
    net.add(lambda part, *values: part(torch.cat(values, 1)), places, part)


def transposed(net):
    place = net.pick(lambda shape: max(shape[1:]) <= MOST // 2)
    if place is not None:
        kernel, outputs = net.chance.choice([2, 3, 4]), net.chance.choice([3, 8, 16])
        part = nn.ConvTranspose2d(net.shapes[place][0], outputs, kernel, 2, padding=net.chance.randrange(2))
        net.add(call, [place], nn.Sequential(part, net.activation()))


def joined(net):
    """Concatenated channels of two or three values, or of one value twice."""
    place = net.pick()
    size = net.shapes[place][1:]
    others = [net.pick(lambda shape: shape[1:] == size) for _ in range(net.chance.choice([1, 2]))]
    net.add(lambda *values: torch.cat(values, 1), [place, *others])


def branches(net):
    """Layers of one value whose results are concatenated, and perhaps shuffled."""
    place = net.pick()
    channels = net.shapes[place][0]
    parts, outputs = [], net.chance.choice([4, 8, 16])
    for kernel in net.chance.choice([(1, 3), (1, 3, 3), (3, 3), (1, 1)]):
        parts.append(net.layer(channels, outputs, kernel, padding=kernel // 2))
    shuffles = net.chance.random() < 0.4

    def function(parts, x):
        y = torch.cat([part(x) for part in parts], 1)
        return y.unflatten(1, (len(parts), -1)).transpose(1, 2).flatten(1, 2) if shuffles else y

    net.add(function, [place], nn.ModuleList(parts))


def added(net):
    place = net.pick()
    other = net.pick(lambda shape: shape == net.shapes[place])
    functions = [torch.add, torch.mul, lambda x, y: F.relu(x + 0.5 * y)]
    net.add(net.chance.choice(functions[:2] if net.activations is SMOOTH else functions), [place, other])


def part_of(net):
    """Some of the channels: a view of a value that others may read, too."""
    place = net.pick(lambda shape: shape[0] >= 2)
    if place is not None:
        channels = net.shapes[place][0]
        first = net.chance.randrange(channels - 1)
        net.add(lambda x: x[:, first : first + (channels - first + 1) // 2], [place])


def pooled(net):
    place = net.pick(lambda shape: min(shape[1:]) >= 2 * LEAST)
    if place is not None:
        smooth = net.activations is SMOOTH
        part = nn.AvgPool2d(2) if smooth or net.chance.random() < 0.4 else nn.MaxPool2d(3, 2, net.chance.randrange(2))
        net.add(call, [place], part)


def enlarged(net):
    place = net.pick(lambda shape: max(shape[1:]) <= MOST // 2)
    if place is not None:
        mode = net.chance.choice(["nearest", "bilinear"])
        net.add(lambda x: F.interpolate(x, scale_factor=2, mode=mode), [place])


def shuffled_pixels(net):
    place = net.pick(lambda shape: max(shape[1:]) <= MOST // 2)
    if place is not None:
        part = nn.Conv2d(net.shapes[place][0], 4 * net.chance.choice([1, 3, 8]), 3, padding=1)
        net.add(lambda conv, x: F.pixel_shuffle(conv(x), 2), [place], part)


STEPS = {
    step.__name__: step
    for step in (
        *(convolution, depthwise, residual, two_layers, inverted, normalised_first, transposed, joined, branches),
        *(added, part_of, pooled, enlarged, shuffled_pixels),
    )
}


# ---- compiling


def decided_by(chance):
    """A function in place of the trials: calls all candidates, and draws their times."""

    def run_trials(calls, rounds, *stays, before=lambda: None):
        drawn = Elimination([*calls], 1, [*calls])
        for name, one in calls.items():
            before()
            one()
            drawn.note(name, chance.uniform(1.0, 4.0))
        return drawn

    return run_trials


def agree(found, right, plain):
    """Compare with float64, relative to the largest value: errors of several layers add up. Gradients that are zero but
    for rounding, as that of a bias before batch normalisation, are compared with the others. Where float32 itself is
    far off (``plain``: eager PyTorch), the network amplifies rounding, and may be off as far."""
    largest = max(float(value.abs().max()) for value in right.values())
    for what, value in right.items():
        assert found[what].shape == value.shape, f"{what} has the shape {[*found[what].shape]}, not {[*value.shape]}"
        scale = max(float(value.abs().max()), 0.02 * largest)
        off, usual = (float((one[what].double() - value).abs().max()) / scale for one in (found, plain))
        assert off < max(2e-3, 30 * usual), f"{what} of a compiled network is wrong\nby {off} of the largest"


def compiled(seed, steps, channels, size, batches, training, last, dynamic, wrapper):
    """``batches``: of the calls. ``last``: channels_last. ``wrapper``: Inductor's in C++."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    net = Network(seed, steps, channels, size, training).train(training)
    exact = copy.deepcopy(net).double()
    layout = torch.channels_last if last else torch.contiguous_format
    net = net.to(memory_format=layout)
    images = [torch.randn(batch, channels, *size).to(memory_format=layout) for batch in batches]
    how = {"dynamic": dynamic, "options": {"cpp_wrapper": wrapper} if not training else None}
    try:
        _compare(net, exact, images, decided_by(Random(seed)), {"backend": "polyconv", **how})
    except InductorError:
        if _compiles(net, images, how):  # with Inductor alone
            raise


def _compare(net, exact, images, trials, how):
    torch._dynamo.reset()
    before = choice.run_trials, swap.run_trials, swap.online.autotune
    choice.run_trials = swap.run_trials = trials
    swap.online.autotune = lambda step: None
    try:
        with warnings.catch_warnings(), settings.use(cache_dir=None):
            warnings.filterwarnings("error", ".*polyconv.*")
            fast, kept = torch.compile(net, **how), []
            for x in images:
                kept.append((x, x.clone(), run(fast, x), run(exact, x.double()), run(net, x)))
            for x, copied, *results in kept:  # later calls must not have written to earlier results
                assert torch.equal(x, copied), "the input has changed"
                agree(*results)
    finally:
        choice.run_trials, swap.run_trials, swap.online.autotune = before


def _compiles(net, images, how):
    torch._dynamo.reset()
    fast = torch.compile(net, **how)
    try:
        for x in images:
            run(fast, x)
    except InductorError:
        return False
    return True


def run(model, x):
    """The outputs of a model by name, and in training its gradients."""
    if not model.training:
        with torch.no_grad():
            return {f"output {place}": y for place, y in enumerate(model(x))}
    x = x.clone().requires_grad_()
    model.zero_grad()
    outputs, chance = model(x), torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, generator=chance).to(y.dtype) for y in outputs]
    torch.autograd.backward(outputs, weights)
    parameters = getattr(model, "_orig_mod", model).named_parameters()
    gradients = {f"the gradient of {name}": p.grad.clone() for name, p in parameters if p.grad is not None}
    results = {f"output {place}": y.detach() for place, y in enumerate(outputs)}
    return {**results, **gradients, "the input's gradient": x.grad}
