"""The config of a run: its keys, their ranges, and the files that give it."""
