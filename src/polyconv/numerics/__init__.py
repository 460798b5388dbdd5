"""Error model: predicted errors of plans, the scales they are relative to, and the float64 reference."""
