"""Whole networks beside the graph compilers: each contender in a process of its own, measured in turn."""
