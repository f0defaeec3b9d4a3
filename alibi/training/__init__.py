"""Training: a jitted step over a device mesh, its optimizer, metrics and the loop."""
