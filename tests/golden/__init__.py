"""What the planners chose and what the compiler made of the kernels, on record (:mod:`golden.record`)."""
