"""Benchmark networks with random weights: well-known ones from other packages, and small ones defined here.

Nothing is downloaded. The packages are the extra ``polyconv[zoo]``; the small networks need none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...problem import Shape


class Vocoder(nn.Module):
    """HiFi-GAN's generator: spectrogram to signal, in upsampling stages with several kernel sizes and dilations."""

    def __init__(self, mels: int = 80, width: int = 512, steps: Sequence[int] = (8, 8, 2, 2)) -> None:
        super().__init__()
        self.read = nn.Conv1d(mels, width, 7, padding=3)
        self.longer, self.blocks = nn.ModuleList(), nn.ModuleList()
        c = width
        for step in steps:
            self.longer.append(nn.ConvTranspose1d(c, c // 2, 2 * step, step, step // 2))
            c //= 2
            self.blocks.append(Mean(DilatedResiduals(c, kernel) for kernel in (3, 7, 11)))
        self.write = nn.Conv1d(c, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        for longer, blocks in zip(self.longer, self.blocks, strict=True):
            x = blocks(longer(F.leaky_relu(x, 0.1)))
        return torch.tanh(self.write(F.leaky_relu(x)))


class Mean(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([module(x) for module in self]).mean(0)


class DilatedResiduals(nn.Module):
    """Residual pairs of convolutions, the first of each dilated."""

    def __init__(self, c: int, kernel: int, dilations: Sequence[int] = (1, 3, 5)) -> None:
        super().__init__()
        self.dilated = nn.ModuleList(nn.Conv1d(c, c, kernel, padding="same", dilation=d) for d in dilations)
        self.dense = nn.ModuleList(nn.Conv1d(c, c, kernel, padding="same") for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:
        for dilated, dense in zip(self.dilated, self.dense, strict=True):
            x = x + dense(F.leaky_relu(dilated(F.leaky_relu(x, 0.1)), 0.1))
        return x


class Demucs(nn.Module):
    """Demucs without its recurrent middle: encoder with strides of 4, transposed decoder to the sources of a mix."""

    def __init__(self, width: int = 48, depth: int = 4, channels: int = 2, sources: int = 4) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        c, back = channels, sources * channels
        for level in range(depth):
            k = width * 2**level
            self.down.append(
                nn.Sequential(nn.Conv1d(c, k, 8, 4, 2), nn.ReLU(), nn.Conv1d(k, 2 * k, 1), nn.GLU(1)),
            )
            ends: list[nn.Module] = [nn.ConvTranspose1d(k, back, 8, 4, 2), *([nn.ReLU()] if level else [])]
            self.up.insert(0, nn.Sequential(nn.Conv1d(k, 2 * k, 3, padding=1), nn.GLU(1), *ends))
            c = back = k

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for down in self.down:
            x = down(x)
            seen.append(x)
        for up in self.up:
            x = up(x + seen.pop())
        return x


def dcgan(width: int = 64, noise: int = 100) -> nn.Module:
    """DCGAN's generator: noise to a 64 x 64 image, by transposed convolutions of stride 2."""
    layers: list[nn.Module] = [nn.ConvTranspose2d(noise, 8 * width, 4, bias=False)]
    for c in (8 * width, 4 * width, 2 * width):
        layers += [nn.BatchNorm2d(c), nn.ReLU(), nn.ConvTranspose2d(c, c // 2, 4, 2, 1, bias=False)]
    ends = (nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())
    return nn.Sequential(*layers, *ends)


class UNet(nn.Module):
    """Segmentation of images or volumes: transposed convolutions in the decoder, skip connections."""

    def __init__(self, axes: int, channels: int, width: int, levels: int, classes: int) -> None:
        super().__init__()
        self.axes = axes
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(self._twice(c, k) for c, k in zip([channels, *widths[:-1]], widths, strict=True))
        self.pool = self._made("MaxPool", 2)
        self.up = nn.ModuleList(self._made("ConvTranspose", 2 * k, k, 2, 2) for k in reversed(widths[:-1]))
        self.after = nn.ModuleList(self._twice(2 * k, k) for k in reversed(widths[:-1]))
        self.last = self._made("Conv", width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for level, down in enumerate(self.down):
            x = down(self.pool(x) if level else x)
            seen.append(x)
        y: Tensor = self.last(_decoded(seen, self.up, self.after))
        return y

    def _twice(self, c: int, k: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for inputs in (c, k):
            convolution = self._made("Conv", inputs, k, 3, padding=1, bias=False)
            layers += [convolution, self._made("BatchNorm", k), nn.ReLU()]
        return nn.Sequential(*layers)

    def _made(self, name: str, *sizes: int, **options: Any) -> nn.Module:
        module: nn.Module = getattr(nn, f"{name}{self.axes}d")(*sizes, **options)
        return module


def _decoded(seen: list[Tensor], ups: nn.ModuleList, afters: nn.ModuleList) -> Tensor:
    """The decoder of a U-Net: upsamples the coarsest result, and joins it with the next finer one, level by level."""
    x = seen.pop()
    for up, after in zip(ups, afters, strict=True):
        x = after(torch.cat([up(x), seen.pop()], 1))
    return x


def unet(width: int = 32) -> nn.Module:
    """2-D, five levels."""
    return UNet(2, channels=3, width=width, levels=5, classes=21)


def volume_unet(width: int = 16) -> nn.Module:
    """3-D, three levels."""
    return UNet(3, channels=1, width=width, levels=3, classes=3)


def srcnn() -> nn.Module:
    """Super-resolution of one channel in three layers: 9x9, 5x5, 5x5."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 9, padding=4),
        nn.ReLU(),
        nn.Conv2d(64, 32, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(32, 1, 5, padding=2),
    )


def edsr(blocks: int = 8, width: int = 64) -> nn.Module:
    """Super-resolution by residual blocks without normalisation, doubled in size by pixel shuffle."""
    body = [Residual(_conv(width, width), nn.ReLU(), _conv(width, width)) for _ in range(blocks)]
    ends = (_conv(width, 4 * width), nn.PixelShuffle(2), _conv(width, 3))
    return nn.Sequential(_conv(3, width), *body, *ends)


def large_kernels(width: int = 96, blocks: int = 4, kernel: int = 31) -> nn.Module:
    """RepLKNet-like: depthwise 31x31 between 1x1 layers, on patches."""
    block = [
        Residual(
            nn.Conv2d(width, width, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )
        for _ in range(blocks)
    ]
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 4), *block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)
    )


def audio(width: int = 32, classes: int = 50) -> nn.Module:
    """Audio tagging on spectrograms: kernels longer in time than in frequency, some dilated."""

    def layer(c: int, k: int, dilation: tuple[int, int]) -> list[nn.Module]:
        padding = (2 * dilation[0], 4 * dilation[1])
        conv = nn.Conv2d(c, k, (5, 9), padding=padding, dilation=dilation, bias=False)
        return [conv, nn.BatchNorm2d(k), nn.ReLU()]

    return nn.Sequential(
        *layer(1, width, (1, 1)),
        *layer(width, width, (1, 2)),
        nn.MaxPool2d(2),
        *layer(width, 2 * width, (1, 1)),
        *layer(2 * width, 2 * width, (2, 3)),
        nn.MaxPool2d(2),
        *layer(2 * width, 4 * width, (1, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


def vae_decoder(width: int = 64, latent: int = 4) -> nn.Module:
    """Latent image to an image of eight times its size: residual blocks, nearest-neighbour doubling."""
    parts: list[nn.Module] = [_conv(latent, 4 * width), ResidualBlock(4 * width, 4 * width)]
    c = 4 * width
    for k in (4 * width, 2 * width, width):
        parts += [ResidualBlock(c, k), nn.Upsample(scale_factor=2), _conv(k, k)]
        c = k
    return nn.Sequential(*parts, nn.GroupNorm(8, c), nn.SiLU(), _conv(c, 3))


class CastingConv1d(nn.Conv1d):
    """Casts its weights to the dtype of the input, as in Whisper. ``replace`` leaves it: it overrides a method."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = super()._conv_forward(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return y


class WhisperEncoder(nn.Module):
    """Whisper's encoder of size tiny, with two of its four transformer layers."""

    def __init__(self, mels: int = 80, width: int = 384, layers: int = 2) -> None:
        super().__init__()
        self.first = CastingConv1d(mels, width, 3, padding=1)
        self.halve = CastingConv1d(width, width, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.halve(F.gelu(self.first(x)))).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x


class CausalConv3d(nn.Conv3d):
    """Pads the frames before the first, as autoencoders of videos do."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(F.pad(x, (1, 1, 1, 1, 2, 0)))
        return y


class VideoDecoder(nn.Module):
    """Latent video to one of twice the height and width, by causal convolutions."""

    def __init__(self, width: int = 128, latent: int = 16) -> None:
        super().__init__()
        self.first = CausalConv3d(latent, width, 3)
        self.blocks = nn.ModuleList(self._block(c, c) for c in (width, width))
        self.narrow = CausalConv3d(width, width // 2, 3)
        self.fine = self._block(width // 2, width // 2)
        self.last = CausalConv3d(width // 2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.narrow(F.interpolate(x, scale_factor=(1.0, 2.0, 2.0)))
        y: Tensor = self.last(F.silu(x + self.fine(x)))
        return y

    def _block(self, c: int, k: int) -> nn.Sequential:
        ends = (nn.GroupNorm(8, k), nn.SiLU(), CausalConv3d(k, k, 3))
        return nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), CausalConv3d(c, k, 3), *ends)


class MambaBlock(nn.Module):
    """Mamba's block with a running sum in the place of the state space: the causal convolution calls a function."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.within, self.out = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.conv = nn.Conv1d(2 * width, 2 * width, 4, groups=2 * width, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        a, gate = self.within(x.transpose(1, 2)).chunk(2, -1)
        length, conv = a.shape[1], self.conv
        a = F.conv1d(a.transpose(1, 2), conv.weight, conv.bias, padding=3, groups=conv.groups)[..., :length]
        y: Tensor = self.out(F.silu(a).transpose(1, 2).cumsum(1) * F.silu(gate))
        return y


class NnUNet(nn.Module):
    """nnU-Net for volumes: strided convolutions, instance normalisation, LeakyReLU."""

    def __init__(self, width: int = 32, levels: int = 3, classes: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            nn.Sequential(self._layer(c, k, 2 if c > 1 else 1), self._layer(k, k))
            for c, k in zip([1, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(nn.ConvTranspose3d(2 * k, k, 2, 2) for k in reversed(widths[:-1]))
        self.after = nn.ModuleList(
            nn.Sequential(self._layer(2 * k, k), self._layer(k, k)) for k in reversed(widths[:-1])
        )
        self.last = nn.Conv3d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for down in self.down:
            x = down(x)
            seen.append(x)
        y: Tensor = self.last(_decoded(seen, self.up, self.after))
        return y

    def _layer(self, c: int, k: int, stride: int = 1) -> nn.Sequential:
        normalised = nn.InstanceNorm3d(k, affine=True), nn.LeakyReLU(0.01)
        return nn.Sequential(nn.Conv3d(c, k, 3, stride, 1), *normalised)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = super().forward(x)
        return x + inner


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, each after a normalisation and an activation, as in diffusion models."""

    def __init__(self, c: int, k: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), _conv(c, k))
        self.second = nn.Sequential(nn.GroupNorm(8, k), nn.SiLU(), _conv(k, k))
        self.shortcut = nn.Identity() if c == k else nn.Conv2d(c, k, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shortcut(x) + self.second(self.first(x))
        return y


class DiffusionUNet(nn.Module):
    """The convolutional part of a denoising network: two blocks per level on the way down, two on the way up."""

    def __init__(self, width: int = 64, levels: tuple[int, ...] = (1, 2, 4), channels: int = 4) -> None:
        super().__init__()
        widths = [width * level for level in levels]
        self.first = _conv(channels, width)
        self.down, self.halve, self.up = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        c = width
        for k in widths:
            self.down.append(nn.Sequential(ResidualBlock(c, k), ResidualBlock(k, k)))
            self.halve.append(nn.Conv2d(k, k, 3, stride=2, padding=1))
            c = k
        self.middle = nn.Sequential(ResidualBlock(c, c), ResidualBlock(c, c))
        for k in reversed(widths):
            self.up.append(nn.Sequential(ResidualBlock(c + k, k), ResidualBlock(k, k), _conv(k, k)))
            c = k
        self.last = nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), _conv(c, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skipped = []
        for down, halve in zip(self.down, self.halve, strict=True):
            x = down(x)
            skipped.append(x)
            x = halve(x)
        x = self.middle(x)
        for up in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = up(torch.cat([x, skipped.pop()], 1))
        y: Tensor = self.last(x)
        return y


def _conv(c: int, k: int) -> nn.Conv2d:
    return nn.Conv2d(c, k, 3, padding=1)


TIMM, SEGMENTATION, TORCHVISION = "timm", "segmentation_models_pytorch", "torchvision.models"
STEP = 32
"""Divisor of image sizes: networks halve them up to five times."""
FAMILY = "family"
"""Kind of networks with 1-D, 3-D or transposed convolutions."""
ENABLED = "enabled"
"""Kind of networks for :func:`polyconv.enable`: most have convolutions in subclasses or functions, or volumes."""
LAYER_SCALE = "gamma"
"""Name that timm gives to the factors of a residual branch."""


class ZooError(RuntimeError):
    """Missing package; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Network:
    name: str
    build: Callable[[], nn.Module]
    image: Shape = (3, 224, 224)
    """Channels and spatial sizes of one input: one size for a signal, three for a volume."""
    package: str = ""
    kind: str = ""
    """:data:`FAMILY`, :data:`ENABLED`, both, or empty."""

    @property
    def described(self) -> str:
        """Name and kind, the text that ``--only`` is matched against."""
        return f"{self.name} {self.kind}"

    def input(self, batch: int) -> Shape:
        """Shape of a batch. Above batch 1, sizes are halved, so that a run takes an hour, not a day."""
        channels, *sides = self.image
        return batch, channels, *(sides if batch == 1 else map(_halved, sides))


def _halved(side: int) -> int:
    return min(side, max(STEP, STEP * round(side / 2 / STEP + 1e-9)))


def _timm(name: str, pixels: int = 224) -> Network:
    return Network(name, partial(_made, TIMM, "create_model", name), (3, pixels, pixels), TIMM)


def _torchvision(name: str, **options: Any) -> Network:
    build = partial(_made, TORCHVISION, name, weights=None, **options)
    return Network(name, build, package=TORCHVISION)


def _segmentation(kind: str, encoder: str) -> Network:
    build = partial(_made, SEGMENTATION, kind, encoder, encoder_weights=None, classes=21)
    return Network(f"{kind.lower()}-{encoder}", build, (3, 256, 256), SEGMENTATION)


def _made(package: str, function: str, *arguments: Any, **options: Any) -> nn.Module:
    module: nn.Module = getattr(import_module(package), function)(*arguments, **options)
    return module


NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        _timm("resnet18"),
        _timm("resnet50"),
        _timm("resnext50_32x4d"),
        _timm("mobilenetv2_100"),
        _timm("mobilenetv3_large_100"),
        _timm("mobilenetv4_conv_small"),
        _timm("efficientnet_b0"),
        _timm("efficientnetv2_rw_t"),
        _timm("mixnet_s"),
        _timm("convnext_tiny"),
        _timm("regnety_016"),
        _timm("vgg11"),
        _timm("densenet121"),
        _timm("inception_v3", 299),
        _timm("xception41", 256),
        _timm("hrnet_w18_small"),
        _timm("repvgg_a0"),
        _timm("ghostnet_100"),
        _timm("cspdarknet53", 256),
        _torchvision("shufflenet_v2_x1_0"),
        _torchvision("squeezenet1_1"),
        _torchvision("googlenet", aux_logits=False, init_weights=False),
        _segmentation("DeepLabV3Plus", "resnet18"),
        _segmentation("DeepLabV3Plus", "resnet50"),
        _segmentation("Unet", "resnet18"),
        _segmentation("UnetPlusPlus", "resnet18"),
        _segmentation("FPN", "resnet18"),
        _segmentation("PSPNet", "resnet18"),
        Network("large-kernels", large_kernels),
        Network("srcnn", srcnn, (1, 256, 256)),
        Network("edsr", edsr, (3, 128, 128)),
        Network("diffusion-unet", DiffusionUNet, (4, 64, 64)),
        Network("vae-decoder", vae_decoder, (4, 32, 32)),
        Network("audio", audio, (1, 128, 256)),
        Network("whisper-encoder", WhisperEncoder, (80, 2000), kind=ENABLED),
        Network("video-decoder", VideoDecoder, (16, 4, 16, 16), kind=ENABLED),
        Network("mamba-block", MambaBlock, (768, 512), kind=ENABLED),
        Network("nnu-net", NnUNet, (1, 32, 48, 48), kind=ENABLED),
        Network("vocoder", Vocoder, (80, 32), kind=f"{FAMILY} {ENABLED}"),
        Network("demucs", Demucs, (2, 44032), kind=FAMILY),
        Network("dcgan", dcgan, (100, 1, 1), kind=FAMILY),
        Network("unet-transposed", unet, (3, 128, 128), kind=FAMILY),
        Network("unet-volumes", volume_unet, (1, 32, 64, 64), kind=FAMILY),
    )
}


def randomised(module: nn.Module) -> nn.Module:
    """The module with random statistics and affine parameters of its batch normalisations, and random layer scales.

    Fresh ones are trivial. The last of a residual branch is even zero in timm, or a layer scale of 1e-6 is: an error in
    the branch would not reach the output.
    """
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            for tensor in (part.weight, part.running_var):
                if tensor is not None:
                    nn.init.uniform_(tensor, 0.5, 1.5)
            for tensor in (part.bias, part.running_mean):
                if tensor is not None:
                    nn.init.normal_(tensor, 0.0, 0.1)
    for name, parameter in module.named_parameters():
        if name.rpartition(".")[2] == LAYER_SCALE:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return module


def require(networks: Iterable[Network]) -> None:
    """Raise :class:`ZooError` if a package is missing, before anything is measured."""
    absent = {network.package: network.name for network in networks if not _is_installed(network.package)}
    if absent:
        packages = " and ".join(package.partition(".")[0] for package in absent)
        names = ", ".join(absent.values())
        raise ZooError(f"{names} and others need {packages}, not installed here: pip install 'polyconv[zoo]'")


def modules() -> list[str]:
    """Installed packages, to be preloaded by the fork server."""
    return [package for package in (TIMM, SEGMENTATION, TORCHVISION) if _is_installed(package)]


def _is_installed(package: str) -> bool:
    return not package or find_spec(package.partition(".")[0]) is not None
