"""Time and accuracy of convolutions, as measured by bench, tune, optimize, the doctor and the tests."""
