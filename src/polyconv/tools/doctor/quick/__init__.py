"""The quick self-test: correctness and speed of a few layers."""
