"""The former place of `ExpiringMemory`, which moved to `expire_span.store` in 0.2.0; this alias is removed in 0.3.0."""

from expire_span.store import NEVER, ExpiringMemory

__all__ = ["NEVER", "ExpiringMemory"]
