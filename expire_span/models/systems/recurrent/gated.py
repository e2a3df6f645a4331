"""The gated recurrent unit in its original form, which docs/recurrent.md studies.

    z = sigmoid(Wz x + Uz h' + bz),  r = sigmoid(Wr x + Ur h' + br)
    c = tanh(Wc x + Uc (r * h') + bc),  h = (1 - z) h' + z c

torch.nn.GRU differs in two places: there z is the share that is kept, and r acts after Uc (with a bias of its own inside).
The recurrence is not linear, so time is a loop; what depends on x alone is computed for all steps at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expire_span.models.systems.recurrent import GRUConfig
from expire_span.models.systems.recurrent.layer import Recurrent
from expire_span.models.systems.recurrent.scan import GatedScan


class GatedCell(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(dim, 3 * hidden)
        self.gates = nn.Linear(hidden, 2 * hidden, bias=False)
        self.candidate = nn.Linear(hidden, hidden, bias=False)

    @torch.compiler.disable  # the compiler would unroll the loop over time: minutes for a hundred steps
    def forward(self, x: Tensor, h: Tensor, goes_on: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, T, C], h [B, hidden] -> all hidden states [B, T, hidden] and the last. goes_on [B, T]: 0 where a step does not
        follow from the one before."""
        hidden = h.shape[-1]
        gates, candidates = self.input(x).transpose(0, 1).split((2 * hidden, hidden), -1)
        follows = None if goes_on is None else goes_on.mT.unsqueeze(-1)
        back = self.gates.weight.mT, self.candidate.weight.mT
        steps: Tensor = GatedScan.apply(gates.contiguous(), candidates.contiguous(), *back, h, follows)  # type: ignore[assignment]
        return steps.transpose(0, 1), steps[-1]


class GRU(Recurrent):
    settings_class = GRUConfig

    def build_cell(self, dim: int) -> nn.Module:
        return GatedCell(dim, self.hidden)

    @property
    def reads_episodes(self) -> bool:
        return True

    def run(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        episodes = state.get("episodes")
        if episodes is None:
            y, h = self.rnn(x, state["h"])
            return y, {"h": h}
        goes_on = episodes.diff(dim=1, prepend=torch.zeros_like(episodes[:, :1])) == 0
        return self.rnn(x, state["h"], goes_on.to(x.dtype))[0], {"h": state["h"]}
