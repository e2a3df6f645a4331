"""The operator: `expire_attention`, its definition and its implementations."""

from .choice import can_attend_in_segments, resolve_impl
from .expire_attention import attend_in_segments, expire_attention, spans_of_heads

__all__ = ["attend_in_segments", "can_attend_in_segments", "expire_attention", "resolve_impl", "spans_of_heads"]
