"""Layers and models: the mixer contract, lifetimes, the backbone and what is built on it (decoder, encoder, policy)."""
