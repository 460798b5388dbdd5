"""The wheel for ARM64, cross-built and run under qemu: ``python tools/arm64``."""
