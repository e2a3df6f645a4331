"""Machinery that several memory systems share: projections, bands, windows, grouped attention, rotary positions, precision."""
