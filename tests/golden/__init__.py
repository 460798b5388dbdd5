"""The golden record of plans and machine code (:mod:`golden.record`)."""
