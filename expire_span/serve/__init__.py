"""Continuous batching and an OpenAI-compatible server, for models that were trained here and retrofitted ones."""
