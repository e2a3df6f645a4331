"""The operator: `expire_attention`, its definition and its implementations."""

from .expire_attention import expire_attention, resolve_impl

__all__ = ["expire_attention", "resolve_impl"]
