"""Figures for papers: of one trace, of several side by side, and of the memory systems."""
