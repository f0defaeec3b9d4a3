"""Readers of checkpoints of other code, which become work directories."""
