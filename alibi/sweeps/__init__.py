"""Sweeps: many runs of one experiment, trained, evaluated and reported together, and continued where they stopped."""
