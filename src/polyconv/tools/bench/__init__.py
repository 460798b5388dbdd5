"""Benchmarks of polyconv against PyTorch on workloads, layers and networks: runner, tables and charts."""
