"""Recipes: each script solves one task in under a minute on a CPU and draws one figure."""
