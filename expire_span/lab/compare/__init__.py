"""Comparisons: several memory systems trained on one recipe, with equal parameters and equal numbers of memories."""
