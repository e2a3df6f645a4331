"""The former place of `ExpiringMemory`; it lives in `expire_span.store` since 0.2.0. This alias goes with 0.3.0."""

from expire_span.store import NEVER, ExpiringMemory

__all__ = ["NEVER", "ExpiringMemory"]
