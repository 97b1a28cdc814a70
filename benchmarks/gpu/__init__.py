"""Whole training steps at the paper's sizes: banach, its peers and the machine's limit, measured in one run."""
