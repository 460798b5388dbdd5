"""Tools built on the kernels: audit, bench, doctor, export, inspect, optimize."""
