"""Collects every distinct Conv2d of a hundred networks, and writes ``src/polyconv/measure/data/layers.json``.

    pip install 'polyconv[zoo]'
    python benchmarks/collect_layers.py

The networks are timm's, on the meta device: they have shapes and no numbers, so nothing is downloaded and nothing is
computed. Each gets one image of the size that it was made for. Only plain ``torch.nn.Conv2d`` count, which are what
:func:`polyconv.replace` swaps. ``polyconv bench --suite layers`` reads the file and needs no timm.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

FILE = Path(__file__).resolve().parents[1] / "src/polyconv/measure/data/layers.json"

NETWORKS = """
    bat_resnext26ts convformer_s18 convmixer_768_32 convnext_atto convnext_tiny convnextv2_nano cs3darknet_m
    cs3sedarknet_l cspdarknet53 cspresnext50 darknet53 densenet121 densenet169 densenetblur121d dla34 dla60
    dla60_res2net dpn68 dpn92 ecaresnet50d edgenext_small efficientformerv2_s0 efficientnet_b0 efficientnet_b3
    efficientnet_es efficientnet_lite0 efficientnetv2_rw_s efficientnetv2_rw_t efficientvit_b1 ese_vovnet19b_dw
    ese_vovnet39b fasternet_t1 fastvit_t8 fbnetc_100 fbnetv3_b gcresnet50t gernet_m ghostnet_100 ghostnetv2_100
    hardcorenas_c hgnet_tiny hgnetv2_b0 hrnet_w18_small hrnet_w32 inception_next_tiny inception_resnet_v2 inception_v3
    inception_v4 lcnet_100 legacy_senet154 levit_conv_128 mambaout_tiny mixnet_s mnasnet_100 mobilenet_edgetpu_100
    mobilenetv1_100 mobilenetv2_100 mobilenetv2_140 mobilenetv3_large_100 mobilenetv3_small_100 mobilenetv4_conv_medium
    mobilenetv4_conv_small mobileone_s1 mobilevit_s mobilevitv2_100 nasnetalarge pnasnet5large pvt_v2_b1 rdnet_tiny
    regnetx_032 regnety_016 regnety_080 regnetz_c16 repghostnet_100 repvgg_a0 repvgg_b1g4 repvit_m1 res2net50_26w_4s
    resnest50d resnet18 resnet34 resnet50 resnet50d resnetrs50 resnetv2_50 resnext50_32x4d rexnet_100 selecsls42b
    semnasnet_100 seresnet50 skresnet50 spnasnet_100 starnet_s2 tinynet_a tresnet_m vgg11 vgg16_bn vovnet39a
    wide_resnet50_2 xception41
"""


def convolutions(network: str) -> Counter[tuple[int, ...]]:
    """Count of each convolution in a network, as numbers in the order of the file's columns."""
    with torch.device("meta"):
        model = timm.create_model(network).eval()
    found: Counter[tuple[int, ...]] = Counter()

    def note(module: nn.Module, inputs: tuple[Tensor, ...], _: object) -> None:
        assert isinstance(module, nn.Conv2d)
        wide, right, high, bottom = module._reversed_padding_repeated_twice
        if module.padding_mode == "zeros" and (wide, high) == (right, bottom):
            moves = (*module.stride, high, wide, *module.dilation)
            image = inputs[0].shape[1:]
            found[
                (*image, module.out_channels, *module.kernel_size, *moves, module.groups, module.bias is not None)
            ] += 1

    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.register_forward_hook(note)
    with torch.no_grad():
        model(torch.empty(1, *model.pretrained_cfg["input_size"], device="meta"))
    return found


def main() -> None:
    networks = NETWORKS.split()
    layers: dict[str, list[tuple[int, ...]]] = {}
    uses: Counter[tuple[int, ...]] = Counter()
    for network in networks:
        found = convolutions(network)
        layers[network] = [layer for layer in found if layer not in uses]
        uses += found
    columns = "channels height width out_channels kernel(2) stride(2) padding(2) dilation(2) groups bias uses"
    about = (
        f"Every distinct Conv2d of {len(networks)} networks of timm {timm.__version__} at their own image size, each "
        "under the first network that has it; uses: how many convolutions of all networks are this one. "
        "Written by benchmarks/collect_layers.py."
    )
    lines = [f'"about": {json.dumps(about)}', f'"columns": {json.dumps(columns)}']
    for network, own in layers.items():
        rows = (json.dumps([int(number) for number in (*layer, uses[layer])], separators=(",", ":")) for layer in own)
        lines.append(f"{json.dumps(network)}: [\n" + ",\n".join(rows) + "]")
    FILE.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
    size = FILE.stat().st_size / 1024
    print(f"{FILE.name}: {len(uses)} distinct convolutions of {sum(uses.values())}, {size:.0f} KiB")


if __name__ == "__main__":
    main()
