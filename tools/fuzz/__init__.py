"""A fuzzer for polyconv: parts, each an endless, seeded sequence of cases.

``python tools/fuzz --list`` names the parts; README.md explains how to run and write one.
"""
