"""torch's convolutions on the layers of a kernel repository: ``python examples/kernelize.py REPOSITORY``."""

import sys
from pathlib import Path

import torch
from kernels import LocalLayerRepository, Mode, kernelize, register_kernel_mapping, replace_kernel_forward_from_hub
from torch import nn

repository = Path(sys.argv[1])
family = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
for module in family:
    # Not for subclasses, whose forward may do more.
    replace_kernel_forward_from_hub(module, module.__name__, condition=lambda one: type(one) in family)
    layer = LocalLayerRepository(repository, layer_name=module.__name__)
    register_kernel_mapping({module.__name__: {"cpu": layer}})

model = nn.Sequential(nn.Conv2d(8, 16, (5, 9), padding=(4, 12), dilation=(2, 3)), nn.ReLU(), nn.Conv2d(16, 8, 3))
x = torch.randn(2, 8, 64, 96)
expected = model(x)
model = kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu")
print(f"largest difference {float((model(x) - expected).detach().abs().max()):.0e}")
