"""A cue half a million tokens back: a small model learns to name a value that followed a mark early in a row.

`benchmarks.million` runs it, by gradients through all pieces and, as their rival, by truncated training with carried memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.models.decoder import Decoder
from expire_span.models.state import detach
from expire_span.ops.context import backward_in_pieces
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig

from .timing import Deadline

if TYPE_CHECKING:
    from .million import Size

MILLION = 2**20
VALUES, MARK, ASK = 6, 6, 7
PIECES = 4
PRICE = 3e-6
"""Weight of the mean span in the loss. A larger one shortens what is kept as soon as all answers are right."""
LEAST = 64
"""Steps for which every memory lives at least."""


def latest_mark(length: int) -> int:
    return min(length // PIECES - 1, MILLION // 64)


def draw_rows(rows: int, length: int, draw: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] and answers [B]. The mark stands in the first piece, early in it if it is long; the question at the end."""
    x = torch.randint(VALUES, (rows, length), generator=draw, device=device)
    at = torch.randint(latest_mark(length), (rows, 1), generator=draw, device=device)
    x.scatter_(1, at, MARK)
    x[:, -1] = ASK
    return x, x.gather(1, at + 1).squeeze(1)


def build_recall(length: int, start: int, device: torch.device) -> Decoder:
    """Every memory is born on its ramp, which is twice the row's length: the gradient of a span then has no scale of its own,
    and is strong where a memory is about to die. Before training all live for twice the first rows' length. Positions are
    learned for the nearest tokens only, so that keys match alike at any distance."""
    torch.manual_seed(0)
    ramp = 2 * length
    mixer = ExpireSpanConfig(max_span=64, ramp=ramp, min_span=float(LEAST - ramp), initial_span=0.5, span_loss="l1")
    shape: dict[str, Any] = dict(
        vocab=8, dim=64, layers=2, heads=2, ff_dim=128, positions="relative", relative_window=4
    )
    decoder = Decoder(DecoderConfig.modern(**shape, mixer=mixer)).to(device)
    for block in decoder.layers():
        nn.init.constant_(block.mixer.span_predictor.bias, math.log(2 * start / ramp))  # type: ignore[union-attr]
    return decoder


def learn_in_pieces(decoder: Decoder, x: Tensor, y: Tensor, weight: float) -> Tensor:
    answers: list[Tensor] = []

    def loss_of(n: int) -> Tensor:
        logits, _, aux = decoder(x.chunk(PIECES, 1)[n], keep="nothing")
        price = weight / PIECES * aux.loss
        if n < PIECES - 1:
            return price
        answers.append(logits[:, -1, :VALUES].detach())
        return F.cross_entropy(logits[:, -1, :VALUES], y) + price

    backward_in_pieces(loss_of, PIECES)
    return answers[-1]


def learn_truncated(decoder: Decoder, x: Tensor, y: Tensor, weight: float) -> Tensor:
    state, answers = None, x
    for n, part in enumerate(x.chunk(PIECES, 1)):
        logits, state, aux = decoder(part, detach(state), keep="hidden")
        loss = weight / PIECES * aux.loss
        if n == PIECES - 1:
            answers = logits[:, -1, :VALUES]
            loss = loss + F.cross_entropy(answers, y)
        loss.backward()
    return answers.detach()


@torch.inference_mode()
def read_and_answer(decoder: Decoder, x: Tensor) -> tuple[Tensor, float]:
    """Answers after reading with memory that is really deleted, block by block, and the mean number of living memories."""
    state, logits, live = None, x, []
    for part in x.chunk(4 * PIECES, 1):
        logits, state, aux = decoder(part, state)
        live.append(aux.live.mean())
    return logits[:, -1, :VALUES], float(torch.stack(live).mean())


@dataclass
class Lesson:
    """How a model is taught: rows become longer by a quarter whenever nearly all recent answers were right, and shorter again
    where many were wrong. Every second length is drawn below the longest, so that some memories are asked for just before they
    die: a memory that is dead by then gets no gradient."""

    size: Size
    step: Callable[[Decoder, Tensor, Tensor, float], Tensor]
    device: torch.device
    seconds: float
    lengths: list[int] | None = None
    """The lengths of another lesson, to be followed; None grows them by the answers."""
    done: list[tuple[int, float]] = field(default_factory=list)
    longest: float = 0.0
    changed: int = 0
    """The step at which the longest length changed last."""

    def run(self) -> dict[str, Any]:
        size, deadline = self.size, Deadline(self.seconds)
        decoder = build_recall(size.recall_length, size.recall_start, self.device)
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
        draw = torch.Generator(self.device).manual_seed(1)
        while deadline.left > 0 and (self.lengths is None or len(self.done) < len(self.lengths)):
            length = self._next_length()
            x, y = draw_rows(min(size.recall_rows, size.recall_tokens // length), length, draw, self.device)
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (len(self.done) + 1) / 50)
            answers = self.step(decoder, x, y, PRICE)
            nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            self.done.append((length, float((answers.argmax(-1) == y).float().mean())))
            if len(self.done) % 25 == 0:
                print(f"  step {len(self.done)}: {length} tokens, {self._recent(25):.2f} right", flush=True)
            whole = self.longest == size.recall_length and len(self.done) - self.changed >= 30
            if self.lengths is None and whole and self._recent(20) > 0.97:
                break
        return self._report(decoder, draw, deadline.spent)

    def _recent(self, count: int) -> float:
        right = [share for _, share in self.done[-count:]]
        return sum(right) / max(len(right), 1)

    def _next_length(self) -> int:
        """The first piece of a row holds the mark, so that lengths are multiples of the pieces."""
        count, start = len(self.done), self.size.recall_start
        if self.lengths is not None:
            return self.lengths[count]
        self.longest = self.longest or start
        if count - self.changed >= 4:
            right = self._recent(4)
            factor = 1.25 if right > 0.95 else 0.8 if right < 0.7 else 1.0
            after = min(max(self.longest * factor, start), self.size.recall_length)
            if after != self.longest:
                self.longest, self.changed = after, count
        share = 1.0 if count % 2 else 0.5 + 0.5 * random.Random(count).random()
        return 16 * round(share * self.longest / 16)

    def _report(self, decoder: Decoder, draw: torch.Generator, seconds: float) -> dict[str, Any]:
        size, right, live = self.size, [], []
        rows = max(1, size.recall_tokens // size.recall_length)
        for _ in range(max(1, 64 // rows) if self.device.type == "cuda" else 1):
            x, y = draw_rows(rows, size.recall_length, draw, self.device)
            answers, alive = read_and_answer(decoder.eval(), x)
            right.append((answers.argmax(-1) == y).float().mean())
            live.append(alive)
        found = {"right": float(torch.stack(right).mean()), "rows": rows * len(right), "live": sum(live) / len(live)}
        least = size.recall_length - 1 - latest_mark(size.recall_length)
        steps = {"steps": len(self.done), "longest": max(length for length, _ in self.done), "seconds": seconds}
        return {"length": size.recall_length, "least_distance": least, **found, **steps, "course": self.done}
