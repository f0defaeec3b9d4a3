"""Readers of checkpoints that other code has made: they become work directories."""
