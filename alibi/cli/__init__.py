"""The command line of the entry points: flags in, exit codes and one-line errors out."""
