"""Rows of unequal length in flat buffers, one behind the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """The location of each row in the flat buffers. Every row has free slots after its last memory.

    Slot 0 belongs to no row and stays empty: reading a rectangle takes its padding from there. A batch row, or one key/value
    head of it, counts as a row; all rows grow by the same number of slots, one for each token appended.
    """

    starts: Tensor
    """First slot of each row, [rows]."""
    counts: Tensor
    """Slots in use in each row when these segments were laid out, [rows]."""
    base: int
    """Largest of `counts`, known to the host without waiting for the device."""
    total: int
    """Sum of `counts`, known to the host without waiting for the device."""
    room: int
    """Free slots that each row had when these segments were laid out."""

    def ends(self, used: int) -> Tensor:
        """The slot after the last one in use of each row [rows], when the widest row has `used` slots in use."""
        return self.starts + self.counts + (used - self.base)

    @classmethod
    def lay_out(cls, counts: Tensor, total: int, base: int, room: int) -> Segments:
        widths = counts + room
        return cls(1 + widths.cumsum(0) - widths, counts, base, total, room)

    @property
    def capacity(self) -> int:
        """Total number of slots of the flat buffers."""
        return 1 + self.total + len(self.counts) * self.room

    def slots(self) -> Tensor:
        """Index of every slot in use when the segments were laid out, row after row, [total]."""
        device = self.counts.device
        row = torch.repeat_interleave(
            torch.arange(len(self.counts), device=device), self.counts, output_size=self.total
        )
        before = self.counts.cumsum(0) - self.counts
        return (self.starts - before)[row] + torch.arange(self.total, device=device)

    def places(self, used: int) -> Tensor:
        """For each place of a rectangle [rows, used], flattened, the slot to read: rows are aligned at their ends, padding is
        0."""
        slot = torch.arange(-used, 0, device=self.starts.device) + self.ends(used).unsqueeze(1)
        return torch.where(slot >= self.starts.unsqueeze(1), slot, 0).flatten()

    def fill(self, taken: Tensor, target: Tensor, empty: int) -> Tensor:
        """A flat buffer that holds `taken` at the slots `target`, and `empty` everywhere else."""
        out = taken.new_full((self.capacity, *taken.shape[1:]), empty)
        return out.index_copy_(0, target, taken)
