"""Streams: many rows that read and generate any number of tokens in bounded memory."""

from expire_span.models.marks import FREE, KEEP
from expire_span.sampling import Sampling

from .interface import Prefilled
from .stream import Stream
from .tokens import Events, Step

__all__ = ["FREE", "KEEP", "Events", "Prefilled", "Sampling", "Step", "Stream"]
