"""Lowering of problems to those that kernels take: signals, volumes, extreme geometry, borders, epilogues."""
