"""float32 tensors at TF32's accuracy: one FP16 product of scaled operands on tensor cores."""
