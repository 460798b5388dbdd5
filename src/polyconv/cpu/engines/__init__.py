"""CPU engines: each lists its kernels as candidates and prepares the chosen one."""
