"""``torch.compile(model, backend="polyconv")``: Inductor with polyconv's kernels where they are faster."""
