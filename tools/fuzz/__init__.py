"""A campaign against polyconv: parts that try to break it, each an endless, seeded sequence of cases.

``python tools/fuzz --list`` names the parts; README.md says how to run one, and how to write one.
"""
