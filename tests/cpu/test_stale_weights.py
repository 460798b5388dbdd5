"""Weight changes that no version counter shows: the weight cache follows them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

import polyconv
from polyconv.backend import backend_for
from polyconv.cpu import native
from polyconv.cpu.backend import CpuBackend
from polyconv.cpu.engines.tile_lanes import schemes
from polyconv.cpu.weight_cache import TransformedWeights
from polyconv.numerics.scale import largest, scales
from polyconv.problem import Problem

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no native kernels")


# ---- which weights change


def _bits(w: Tensor) -> Tensor:
    return w.view(torch.int32)


def _flipped_bit(w: Tensor, place: int, bit: int) -> Tensor:
    changed = w.clone()
    _bits(changed).view(-1)[place] ^= 1 << bit if bit < 31 else -(2**31)
    return changed


def _exchanged(w: Tensor, one: int, other: int) -> Tensor:
    changed = w.clone().view(-1)
    changed[[one, other]] = changed[[other, one]]
    return changed.view(w.shape)


def _negated(w: Tensor, channels: slice) -> Tensor:
    changed = w.clone()
    changed[:, channels] *= -1
    return changed


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda w: -w,
    "twice": lambda w: 2 * w,
    "a half": lambda w: w / 2,
    "2**-20 of it": lambda w: w * 2.0**-20,
    "one output channel negated": lambda w: torch.cat([w[:-1], -w[-1:]]),
    "one input channel negated": lambda w: _negated(w, slice(-1, None)),
    "every other input channel negated": lambda w: _negated(w, slice(None, None, 2)),
    "the sign of the last element": lambda w: _flipped_bit(w, -1, 31),
    "the last bit of the first element": lambda w: _flipped_bit(w, 0, 0),
    "output channels rolled": lambda w: w.roll(1, 0),
    "input channels rolled": lambda w: w.roll(1, 1),
    "kernel mirrored": lambda w: w.flip(3),
    "reversed": lambda w: w.flip(0, 1, 2, 3),
    "first and last exchanged": lambda w: _exchanged(w, 0, -1),
    "neighbours exchanged": lambda w: _exchanged(w, 0, 1 % w.numel()),
    "sorted": lambda w: w.reshape(-1).sort().values.view(w.shape),
    "nothing but zeros": torch.zeros_like,
    "nothing but negative zeros": lambda w: torch.zeros_like(w).neg(),
    "NaN": lambda w: torch.full_like(w, torch.nan),
    "NaN of another payload": lambda w: _flipped_bit(torch.full_like(w, torch.nan), 0, 3),
}


# ---- ways to write


def _by_memmove(w: Parameter, new: Tensor) -> None:
    ctypes.memmove(w.data_ptr(), new.data_ptr(), w.numel() * w.element_size())


def _by_numpy(w: Parameter, new: Tensor) -> None:
    w.detach().numpy()[...] = new.numpy()


def _by_parameter(w: Parameter, new: Tensor) -> None:
    with torch.no_grad():
        Parameter(w.data).copy_(new)


def _by_inference_mode(w: Parameter, new: Tensor) -> None:
    with torch.inference_mode():
        w.data.copy_(new)


def _by_storage(w: Parameter, new: Tensor) -> None:
    w.untyped_storage().copy_(new.untyped_storage())


def _by_buffer(w: Parameter, new: Tensor) -> None:
    memory = (ctypes.c_float * w.numel()).from_address(w.data_ptr())
    np.ctypeslib.as_array(memory)[:] = new.as_strided((w.numel(),), (1,)).numpy()


def _by_another_tensor(w: Parameter, new: Tensor) -> None:
    memory = w.untyped_storage()
    torch.empty(0, dtype=w.dtype).set_(memory, 0, w.shape, w.stride()).copy_(new)


def _by_swap(w: Parameter, new: Tensor) -> None:
    """Moved to other memory and back, with a write in between: the address is the old one."""
    before = w.data
    w.data = torch.zeros_like(before)
    before.copy_(new)
    w.data = before


WAYS: dict[str, Callable[[Parameter, Tensor], object]] = {
    ".data": lambda w, new: w.data.copy_(new),
    "a view of .data": lambda w, new: [w.data[i].copy_(new[i]) for i in range(len(new))],
    ".data of a view": lambda w, new: [w[i].data.copy_(new[i]) for i in range(len(new))],
    "detach().numpy()": _by_numpy,
    "memmove": _by_memmove,
    "a ctypes buffer": _by_buffer,
    "another parameter": _by_parameter,
    "inference mode": _by_inference_mode,
    "untyped_storage": _by_storage,
    "set_ on the same storage": _by_another_tensor,
    "DLPack": lambda w, new: torch.from_dlpack(w.detach()).copy_(new),
    "a swap and back": _by_swap,
    "a swap": lambda w, new: setattr(w, "data", new.clone(memory_format=torch.preserve_format)),
}

SHAPES = {
    "one element": (1, 1, 1, 1),
    "an odd tail": (5, 3, 3, 3),
    "whole stripes": (32, 16, 1, 1),
    "large": (128, 64, 3, 3),
}


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_kept_weights_follow_every_way_to_write(
    way: Callable[[Parameter, Tensor], object], shape: tuple[int, int, int, int], channels_last: bool
) -> None:
    kept = TransformedWeights()
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x, y = torch.empty(1, shape[1], 8, 8), torch.empty(1, shape[0], 9 - shape[2], 9 - shape[3])
    geometry, plan = [1, 1, 0, 0, 1, 1, 1, 0], [0, len(schemes()) - 1, 0, 0, 0]
    first = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    w = Parameter(first.clone(memory_format=memory_format))

    def follows() -> bool:
        expected = torch.ops.polyconv_cpu.transform_weights(x, w, y, geometry, plan)
        found = kept.of(x, w, y, geometry, plan)
        assert found is not None
        return torch.equal(_bits(found), _bits(expected))

    for name, change in CHANGES.items():
        for new in (first, change(first)):
            way(w, new.clone(memory_format=memory_format))
            assert torch.equal(_bits(w.data), _bits(new))
            assert follows(), name


def test_what_did_not_change_is_kept() -> None:
    kept = TransformedWeights()
    w, x, y = torch.randn(8, 8, 3, 3), torch.empty(1, 8, 8, 8), torch.empty(1, 8, 6, 6)
    arguments = x, w, y, [1, 1, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0]
    assert kept.of(*arguments) is kept.of(*arguments)


NAMED: dict[str, Callable[[Tensor], object]] = {
    "weight.data.mul_(2)": lambda w: w.data.mul_(2),
    "weight.data.mul_(2**-7)": lambda w: w.data.mul_(2.0**-7),
    "weight.data.neg_()": lambda w: w.data.neg_(),
    "weight.data[5].neg_()": lambda w: w.data[5].neg_(),
    "numpy()[:, 3] *= -1": lambda w: np.negative(w.detach().numpy()[:, 3], out=w.detach().numpy()[:, 3]),
    "weight.data.roll(1, 0)": lambda w: w.data.copy_(w.data.roll(1, 0)),
}


@pytest.mark.parametrize(("channels", "size", "kept"), [(16, 128, True), (128, 64, True), (128, 16, False)])
@pytest.mark.parametrize("write", NAMED.values(), ids=NAMED)
def test_a_module_computes_with_the_weights_that_it_has(
    write: Callable[[Tensor], object], channels: int, size: int, kept: bool
) -> None:
    """Cached and read at each call, or transformed at each call because reading would cost too much."""
    backend = backend_for(torch.device("cpu"))
    assert isinstance(backend, CpuBackend)
    conv, x = polyconv.Conv2d(channels, channels, 3, padding=1, bias=False), torch.randn(1, channels, size, size)

    def check() -> None:
        exact = F.conv2d(x.double(), conv.weight.double(), padding=1)
        problem = Problem.make("fprop", tuple(x.shape), tuple(conv.weight.shape), padding=(1, 1, 1, 1))
        assert largest((conv(x).double() - exact).abs(), scales(problem, {"x": x, "w": conv.weight})["y"]) <= 1e-4

    with torch.no_grad():
        check()
        assert (conv.weight.data_ptr() in {address for address, *_ in backend.weights._kept}) == kept
        write(conv.weight)
        check()
    with torch.inference_mode():
        write(conv.weight)
        check()


def test_the_bias_is_read_anew() -> None:
    conv, x = polyconv.Conv2d(16, 16, 3), torch.randn(1, 16, 24, 24)
    with torch.no_grad():
        before = conv(x)
        conv.bias.data.add_(1)
        torch.testing.assert_close(conv(x), before + 1)


def test_a_weight_at_the_address_of_a_former_one() -> None:
    memory, x = torch.randn(16, 16, 3, 3), torch.randn(1, 16, 32, 32)
    with torch.no_grad():
        for sign in (1.0, -1.0):
            memory.mul_(sign)
            w = torch.empty(0).set_(memory.untyped_storage(), 0, memory.shape, memory.stride())
            exact = F.conv2d(x.double(), w.double(), padding=1)
            torch.testing.assert_close(polyconv.conv2d(x, w, padding=1).double(), exact, rtol=0, atol=2e-3)


# ---- the hash itself


def _hash(dense: Tensor) -> int:
    return int(torch.ops.polyconv_cpu.hash(dense))


def _data(count: int) -> Iterator[Tensor]:
    yield torch.zeros(count)
    yield torch.ones(count)
    yield torch.arange(count, dtype=torch.float32)
    yield torch.randn(count, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 33, 63, 64, 65, 97])
def test_every_single_bit_counts(count: int) -> None:
    for data in _data(count):
        changed = [_flipped_bit(data, place, bit) for place in range(count) for bit in range(32)]
        assert len({_hash(each) for each in [data, *changed]}) == 1 + 32 * count


def test_a_single_bit_of_many_counts() -> None:
    data = torch.randn(1_000_003)
    places = torch.randint(len(data), (500,), generator=torch.Generator().manual_seed(2)).tolist()
    hashes = {_hash(data)}
    for bit, place in enumerate([0, 1, len(data) - 1, *set(places)]):
        hashes.add(_hash(_flipped_bit(data, place, bit % 32)))
    assert len(hashes) == 1 + len({0, 1, len(data) - 1, *places})


@pytest.mark.parametrize("count", [2, 33, 64, 129, 260])
def test_the_order_counts(count: int) -> None:
    data = torch.randn(count, generator=torch.Generator().manual_seed(3))
    pairs = list(itertools.combinations(range(count), 2))
    assert len({_hash(_exchanged(data, *pair)) for pair in pairs} | {_hash(data)}) == len(pairs) + 1


def test_the_size_counts() -> None:
    assert len({_hash(torch.zeros(count)) for count in range(2000)}) == 2000


def test_no_two_of_many_structured_changes_collide() -> None:
    """Signs and exponents of one, two and three elements: changes that 32-bit sums and products lose."""
    seen, made = set(), 0
    for data in (torch.zeros(96), torch.ones(96), torch.randn(96, generator=torch.Generator().manual_seed(4))):
        bits = _bits(data).numpy()
        for places in itertools.chain(*(itertools.combinations(range(0, 96, step), n) for n, step in ((2, 1), (3, 2)))):
            for pattern in (0x80000000, 0x00800000):
                changed = bits.copy()
                changed[list(places)] ^= np.uint32(pattern).view(np.int32)
                seen.add(_hash(torch.from_numpy(changed).view(torch.float32)))
                made += 1
    assert made > 100_000
    assert len(seen) == made


def test_every_bit_of_the_input_reaches_every_bit_of_the_hash() -> None:
    """Each of the 64 bits flips in about half of all cases, whichever input bit changes."""
    data = torch.randn(300, generator=torch.Generator().manual_seed(5))
    before = _hash(data)
    for bit in range(32):
        changes = [(_hash(_flipped_bit(data, place, bit)) ^ before) & (2**64 - 1) for place in range(300)]
        rates = [sum(change >> place & 1 for change in changes) / 300 for place in range(64)]
        assert 0.3 < min(rates) <= max(rates) < 0.7
