"""The operators under PyTorch's transforms: autograd, autocast, fake tensors, vmap, DTensor, export."""
