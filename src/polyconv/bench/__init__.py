"""polyconv against PyTorch on named workloads: the rows, and the pictures of them."""
