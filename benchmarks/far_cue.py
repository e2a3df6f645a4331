"""A cue more than half a million tokens back: a small model learns to name a value that followed a mark early in a row.

`python -m benchmarks.far_cue [--length 1048576] [--seconds 80] [--seed 0] [--how pieces truncated]`

It learns by gradients through all pieces of a row; its rival, over the same rows, by truncated training with carried memory.

Rows grow fourfold from lesson to lesson, and with them the ramp on which every memory is born: a life is learned as a part of
the row. What lived to the end of short rows then does so in long ones, and gradients of spans have the same size in all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.models.backbone import BackboneAux
from expire_span.models.decoder import Decoder
from expire_span.models.state import detach
from expire_span.ops.context import backward_in_pieces
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig

from .record import save
from .timing import Deadline, guarded

MILLION = 2**20
VALUES, MARK, ASK = 6, 6, 7
PIECES = 4
WHOLE = 2**20
"""Tokens of a step that are read at once."""
LEAST = 16
"""Steps for which every memory lives at least."""


@dataclass(frozen=True)
class Size:
    """How rows grow, and how a model learns from them."""

    length: int = MILLION
    start: int = 64
    rows: int = 64
    tokens: int = 2**21
    """Tokens in a step at most: longer rows are fewer."""
    steps: int = 40
    """Steps of a lesson at least."""
    lr: float = 3e-3
    later_lr: float = 1e-3
    """Rate of all lessons but the first."""
    price: float = 0.02
    """Weight of the logarithm of the mean life, summed over layers, once all answers are right."""


def draw_rows(
    rows: int, length: int, draw: torch.Generator, device: torch.device, early: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] and answers [B]. The question stands at the end; the mark in any piece but the last, or, where it must be
    early, in the first."""
    x = torch.randint(VALUES, (rows, length), generator=draw, device=device)
    latest = length // PIECES * (1 if early else PIECES - 1) - 1
    at = torch.randint(latest, (rows, 1), generator=draw, device=device)
    x.scatter_(1, at, MARK)
    x[:, -1] = ASK
    return x, x.gather(1, at + 1).squeeze(1)


def build_recall(length: int, seed: int, device: torch.device) -> Decoder:
    """For rows of this length: every memory is born on a ramp of twice the row, and before training nearly all live to its end.
    Positions are learned for the nearest tokens only, so that keys match alike at any distance."""
    torch.manual_seed(seed)
    ramp = 2 * length
    mixer = ExpireSpanConfig(max_span=1, ramp=ramp, min_span=float(LEAST - ramp), initial_span=0.5, span_loss="l1")
    shape: dict[str, Any] = dict(
        vocab=8, dim=64, layers=2, heads=2, ff_dim=128, positions="relative", relative_window=4
    )
    decoder = Decoder(DecoderConfig.modern(**shape, mixer=mixer)).to(device)
    for block in decoder.layers():
        nn.init.constant_(block.mixer.span_predictor.bias, 2.0)  # type: ignore[union-attr]
    return decoder


def price_of(aux: BackboneAux, ramp: float) -> Tensor:
    """The logarithm of the mean life by layer, so that lives shrink as fast when they are short as when they are long."""
    lives = [torch.log(layer.loss.mean() + ramp) for layer in aux.layers if layer.loss is not None]
    return torch.stack(lives).sum()


def learn_in_pieces(decoder: Decoder, x: Tensor, y: Tensor, weight: float) -> Tensor:
    """Rows that fit are read at once, which gives the same gradients sooner."""
    answers: list[Tensor] = []
    pieces = PIECES if x.numel() > WHOLE else 1

    def loss_of(n: int) -> Tensor:
        logits, _, aux = decoder(x.chunk(pieces, 1)[n], keep="nothing")
        price = weight / pieces * price_of(aux, 2 * x.shape[1])
        if n < pieces - 1:
            return price
        answers.append(logits[:, -1, :VALUES].detach())
        return F.cross_entropy(logits[:, -1, :VALUES], y) + price

    backward_in_pieces(loss_of, pieces)
    return answers[-1]


def learn_truncated(decoder: Decoder, x: Tensor, y: Tensor, weight: float) -> Tensor:
    state, answers = None, x
    for n, part in enumerate(x.chunk(PIECES, 1)):
        logits, state, aux = decoder(part, detach(state), keep="hidden")
        loss = weight / PIECES * price_of(aux, 2 * x.shape[1])
        if n == PIECES - 1:
            answers = logits[:, -1, :VALUES]
            loss = loss + F.cross_entropy(answers, y)
        loss.backward()
    return answers.detach()


@torch.inference_mode()
def read_and_answer(decoder: Decoder, x: Tensor) -> tuple[Tensor, Tensor]:
    """Answers after reading with memory that is really deleted, block by block, and the mean number of living memories by
    layer."""
    state, logits, live = None, x, []
    for part in x.chunk(4 * PIECES, 1):
        logits, state, aux = decoder(part, state)
        live.append(torch.stack([layer.live for layer in aux.layers if layer.live is not None]))
    return logits[:, -1, :VALUES], torch.stack(live).mean(0)


@dataclass
class Lesson:
    """How a model is taught: rows grow fourfold whenever nearly all recent answers were right."""

    size: Size
    step: Callable[[Decoder, Tensor, Tensor, float], Tensor]
    device: torch.device
    seconds: float
    seed: int = 0
    lengths: list[int] | None = None
    """The lengths of another lesson, to be followed; None grows them by the answers."""
    done: list[tuple[int, float]] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        deadline, length = Deadline(self.seconds), self._next_length()
        draw = torch.Generator(self.device).manual_seed(self.seed + 1)
        decoder = build_recall(length, self.seed, self.device)
        while True:
            self._teach(decoder, length, draw, deadline)
            following = self._next_length()
            if deadline.left <= 0 or following in (0, length):
                return self._report(decoder, length, draw, deadline.spent)
            longer = build_recall(following, self.seed, self.device)
            longer.load_state_dict(decoder.state_dict())
            decoder, length = longer, following

    def _next_length(self) -> int:
        """Length of the next row; 0 where nothing is left to do."""
        size, count = self.size, len(self.done)
        if self.lengths is not None:
            return self.lengths[count] if count < len(self.lengths) else 0
        length = self.done[-1][0] if count else size.start
        steps = sum(before == length for before, _ in self.done)
        if steps < size.steps or self._recent(20) < 0.98:
            return length
        return min(4 * length, size.length) if length < size.length else 0

    def _recent(self, count: int) -> float:
        """Fraction of right answers in the last steps, of this lesson only."""
        right = [share for length, share in self.done[-count:] if length == self.done[-1][0]]
        return sum(right) / max(len(right), 1)

    def _teach(self, decoder: Decoder, length: int, draw: torch.Generator, deadline: Deadline) -> None:
        size, steps = self.size, 0
        rate = size.lr if length == size.start else size.later_lr
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        while deadline.left > 0 and self._next_length() == length:
            steps += 1
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, steps / 20)
            x, y = draw_rows(max(1, min(size.rows, size.tokens // length)), length, draw, self.device)
            weight = size.price * max(0.0, (self._recent(10) - 0.8) / 0.2) if steps > 10 else 0.0
            answers = self.step(decoder, x, y, weight)
            nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            self.done.append((length, float((answers.argmax(-1) == y).float().mean())))
            if steps % 20 == 0:
                self._note(decoder, length, draw, deadline)

    def _note(self, decoder: Decoder, length: int, draw: torch.Generator, deadline: Deadline) -> None:
        _, live = read_and_answer(decoder, draw_rows(2, length, draw, self.device)[0])
        said = f"{deadline.spent:.0f} s, step {len(self.done)}: {length} tokens, {self._recent(20):.2f} right"
        print(f"  {said}, {', '.join(f'{n:.0f}' for n in live.tolist())} alive", flush=True)

    def _report(self, decoder: Decoder, length: int, draw: torch.Generator, seconds: float) -> dict[str, Any]:
        """Answers to early marks, in rows of the last lesson."""
        size, right, live = self.size, [], []
        rows = max(1, min(size.rows, size.tokens // length))
        for _ in range(max(1, 64 // rows)):
            x, y = draw_rows(rows, length, draw, self.device, early=True)
            answers, alive = read_and_answer(decoder.eval(), x)
            right.append((answers.argmax(-1) == y).float().mean())
            live.append(alive)
        found = {"right": float(torch.stack(right).mean()), "rows": rows * len(right)}
        found["live"] = torch.stack(live).mean(0).tolist()
        least = length - length // PIECES
        return {
            "length": length,
            "least_distance": least,
            **found,
            "steps": len(self.done),
            "seconds": seconds,
            "course": self.done,
        }


HOW = {"pieces": learn_in_pieces, "truncated": learn_truncated}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--name", default="far_cue", help="of the file")
    parser.add_argument("--seconds", type=float, default=80.0, help="for each way to learn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--how", nargs="+", choices=[*HOW], default=[*HOW])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for option in fields(Size):
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=type(option.default), default=option.default)
    args = parser.parse_args(argv)
    size = Size(**{option.name: getattr(args, option.name) for option in fields(Size)})
    result, lengths = {"size": asdict(size), "seed": args.seed, "errors": {}}, None
    for how in args.how:
        lesson = Lesson(size, HOW[how], torch.device(args.device), args.seconds, args.seed, lengths)
        result[how] = guarded(result["errors"], how, lesson.run)
        lengths = lengths or [length for length, _ in lesson.done]
        print(how, {k: v for k, v in (result[how] or {}).items() if k != "course"}, result["errors"], flush=True)
        print("written to", save(args.name, result, args.out))


if __name__ == "__main__":
    main()
