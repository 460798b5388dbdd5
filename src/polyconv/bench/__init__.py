"""Named workloads: what the tools plan, count and time."""
