"""A sequence in parts: the operator's call holds one part, and reads memories of the others that are still alive.

The parts may lie in several processes (group.py) or come one after another on one device (pieces.py).
"""

from .current import Context, active_context
from .group import ContextGroup, context_parallel
from .pieces import backward_in_pieces

__all__ = ["Context", "ContextGroup", "active_context", "backward_in_pieces", "context_parallel"]
