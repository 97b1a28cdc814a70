"""The command line: strings become objects here and nowhere else."""
