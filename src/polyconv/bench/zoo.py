"""The networks that are measured: well-known ones of other packages, with random weights, and small ones of our own.

Nothing is downloaded. The packages are the extra ``polyconv[zoo]``; the small networks need none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from ..problem import Shape
from . import family_networks as family
from . import small_networks as small

TIMM, SEGMENTATION, TORCHVISION = "timm", "segmentation_models_pytorch", "torchvision.models"
STEP = 32
"""Sizes of images are multiples of it: what networks with five halvings take."""
FAMILY = "family"
"""The kind of networks that have convolutions over one axis or three, or transposed ones."""


class ZooError(RuntimeError):
    """A network cannot be built; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Network:
    """One network, and the image that it is given."""

    name: str
    build: Callable[[], nn.Module]
    image: Shape = (3, 224, 224)
    """Channels and sides of a single image: of a signal one, of a volume three."""
    package: str = ""
    """What it needs beside polyconv."""
    kind: str = ""
    """A word for several of them: :data:`FAMILY`, or none."""

    @property
    def described(self) -> str:
        """Its name and its kind: what words are sought in."""
        return f"{self.name} {self.kind}"

    def input(self, batch: int) -> Shape:
        """The shape of a batch. Images of a larger one are half as high and wide: a run takes an hour, not a day."""
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
        Network("large-kernels", small.large_kernels),
        Network("srcnn", small.srcnn, (1, 256, 256)),
        Network("edsr", small.edsr, (3, 128, 128)),
        Network("diffusion-unet", small.DiffusionUNet, (4, 64, 64)),
        Network("vae-decoder", small.vae_decoder, (4, 32, 32)),
        Network("audio", small.audio, (1, 128, 256)),
        Network("vocoder", family.Vocoder, (80, 32), kind=FAMILY),
        Network("demucs", family.Demucs, (2, 44032), kind=FAMILY),
        Network("dcgan", family.dcgan, (100, 1, 1), kind=FAMILY),
        Network("unet-transposed", family.unet, (3, 128, 128), kind=FAMILY),
        Network("unet-volumes", family.volume_unet, (1, 32, 64, 64), kind=FAMILY),
    )
}
"""By name."""


def require(networks: Iterable[Network]) -> None:
    """See that the packages are there before anything is measured."""
    absent = {network.package: network.name for network in networks if not _is_installed(network.package)}
    if absent:
        packages = " and ".join(package.partition(".")[0] for package in absent)
        names = ", ".join(absent.values())
        raise ZooError(f"{names} and others need {packages}, not installed here: pip install 'polyconv[zoo]'")


def modules() -> list[str]:
    """The packages that are there, to be imported once for many processes."""
    return [package for package in (TIMM, SEGMENTATION, TORCHVISION) if _is_installed(package)]


def _is_installed(package: str) -> bool:
    return not package or find_spec(package.partition(".")[0]) is not None
