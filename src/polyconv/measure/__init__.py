"""How long a convolution takes and how exact it is: what bench, tune, optimize, the doctor and the tests share."""
