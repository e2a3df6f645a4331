"""Streams: many rows that read and generate any number of tokens in bounded memory."""

from expire_span.sampling import Sampling

from .stream import Stream
from .tokens import Events, Step

__all__ = ["Events", "Sampling", "Step", "Stream"]
