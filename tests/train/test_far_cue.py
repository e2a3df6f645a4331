"""What gradients through a whole block teach, and training in short blocks with carried memory does not.

A mark stands somewhere in the first of four pieces. At the end of the last piece the model names the token that followed the
mark. The other tokens look like it, so the first layer must write into a memory that it follows the mark. Only the gradient of
the question, through memories of an earlier piece, can teach it that: carried hidden states pass none to the layer before.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.decoder import Decoder
from expire_span.models.state import detach
from expire_span.ops.context import backward_in_pieces
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig

VALUES, MARK, ASK = 6, 6, 7
PIECE, PIECES, ROWS = 12, 4, 64


def draw_rows(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] and answers [B]."""
    x = torch.randint(VALUES, (ROWS, PIECE * PIECES), generator=draw)
    at = torch.randint(PIECE - 1, (ROWS, 1), generator=draw)
    x.scatter_(1, at, MARK)
    x[:, -1] = ASK
    return x, x.gather(1, at + 1).squeeze(1)


def step_in_pieces(decoder: Decoder, x: Tensor, y: Tensor) -> Tensor:
    seen: list[Tensor] = []

    def loss_of(n: int) -> Tensor:
        logits, _, _ = decoder(x.chunk(PIECES, 1)[n], keep="nothing")
        if n < PIECES - 1:
            return 0 * logits.sum()
        seen.append(logits[:, -1, :VALUES].detach())
        return F.cross_entropy(logits[:, -1, :VALUES], y)

    backward_in_pieces(loss_of, PIECES)
    return seen[-1]


def step_truncated(decoder: Decoder, x: Tensor, y: Tensor) -> Tensor:
    state, logits = None, x
    for part in x.chunk(PIECES, 1):
        logits, state, _ = decoder(part, detach(state), keep="hidden")
    F.cross_entropy(logits[:, -1, :VALUES], y).backward()
    return logits[:, -1, :VALUES].detach()


def learned(step, steps: int) -> float:
    """Share of right answers in the last 50 training steps."""
    torch.manual_seed(0)
    mixer = ExpireSpanConfig(max_span=64, ramp=8, initial_span=0.9)
    decoder = Decoder(DecoderConfig.modern(vocab=8, dim=48, layers=2, heads=4, ff_dim=96, mixer=mixer))
    draw, optimizer, hits = torch.Generator().manual_seed(1), torch.optim.AdamW(decoder.parameters(), lr=3e-3), []
    for n in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (n + 1) / 50)
        x, y = draw_rows(draw)
        hits.append(float((step(decoder, x, y).argmax(-1) == y).float().mean()))
        optimizer.step()
        optimizer.zero_grad()
    return sum(hits[-50:]) / 50


@pytest.mark.long
def test_a_cue_in_an_earlier_piece_is_learned_by_gradients_of_the_whole_alone():
    """A third is what naming the commonest value of the first piece gives. The short twin is in test_context.py: gradients in
    pieces are those of the whole."""
    assert learned(step_in_pieces, 200) > 0.95
    assert learned(step_truncated, 200) < 0.45
