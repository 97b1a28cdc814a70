"""Whole training runs by the command line, and what they came to."""
