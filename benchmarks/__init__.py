"""Against what a user would pick instead: same maps, same stopping norm, same budget, same run."""
