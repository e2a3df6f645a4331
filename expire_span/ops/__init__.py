"""The operator: `expire_attention`, its definition and its implementations."""

from .call import spans_of_heads
from .choice import can_attend_in_segments, resolve_impl
from .expire_attention import attend_in_segments, expire_attention

__all__ = ["attend_in_segments", "can_attend_in_segments", "expire_attention", "resolve_impl", "spans_of_heads"]
