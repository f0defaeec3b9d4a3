"""Devices: how fast they are, and whether their memory suffices."""
