"""Just-in-time compilation: kernel source to cubin (NVRTC), cubins on disk (cache, bundle), resource usage."""
