"""The shared test matrix: checks that every memory system must pass inside a decoder, those of users as well.

Each check takes a decoder in float64 and raises an `AssertionError` if it fails. `check_system` builds a small decoder from a
system's declaration and runs all checks that apply:

    from expire_span.testing import check_system
    check_system("my_system")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models import state as states
from expire_span.models.decoder import Decoder
from expire_span.models.mixer import Keep
from expire_span.models.systems import find
from expire_span.settings.models import DecoderConfig

VOCAB, LENGTH = 40, 60
"""Vocabulary and length of the checks' sequences: quick, but long enough that every system's `example` settings forget."""
KEEPS: tuple[Keep, ...] = ("hidden", "kv")


def draw_tokens(rows: int = 3, count: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def small_config(kind: str, preset: str = "modern", **fields: Any) -> DecoderConfig:
    """A decoder so small that checks are quick, with the settings that the system declares as its example."""
    shape = dict(vocab=VOCAB, dim=32, layers=2, heads=4, kv_heads=2, ff_dim=48, relative_window=8)
    base = getattr(DecoderConfig, preset)(**shape)
    system = find(kind)
    return replace(base, mixer=system.settings(**{**system.example, **fields}))


def stream(model: Decoder, x: Tensor, sizes: int | Sequence[int], keep: Keep, state: Any = None) -> tuple[Tensor, Any]:
    """Feed x [B, T] in pieces; returns the concatenated outputs and the state after the last piece."""
    outputs = []
    for part in x.split(sizes, 1):  # type: ignore[arg-type]
        y, state, _ = model(part, state, keep=keep)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def _close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def _changed(x: Tensor, where: slice | int) -> Tensor:
    other = x.clone()
    other[:, where] = (other[:, where] + 1) % VOCAB
    return other


@torch.no_grad()
def check_reads_the_past(model: Decoder, keep: Keep) -> None:
    """Without this, all other checks would pass for a system that remembers nothing."""
    x = draw_tokens()
    moved = (stream(model, x, 20, keep)[0] - stream(model, _changed(x, 30), 20, keep)[0]).abs().amax((0, 2))
    assert moved[31] > 1e-6, "a changed token does not change the next output"
    assert moved[40:45].max() > 1e-9, (
        "a token changes no output ten or more steps after it, in the next block: nothing is carried from block to block, "
        "or the example settings forget too soon for these checks"
    )


def check_causal(model: Decoder, keep: Keep) -> None:
    """Later tokens change no earlier output."""
    x = draw_tokens()
    _close(model(x, keep=keep)[0][:, :33], model(_changed(x, slice(33, None)), keep=keep)[0][:, :33], 1e-12)


@torch.no_grad()
def check_any_chopping(model: Decoder, keep: Keep, sizes: Sequence[int] = (*[1] * 12, *[7] * 3, 27)) -> None:
    """A sequence fed in pieces gives the outputs of the sequence fed whole."""
    x = draw_tokens()
    _close(stream(model, x, list(sizes), keep)[0], model(x, keep=keep)[0], 1e-11)


def check_gradients_of_any_chopping(model: Decoder, keep: Keep) -> None:
    """Gradients within the last block do not depend on how the past was cut into blocks."""
    x, found = draw_tokens(), []
    for sizes in ([30], [12, 18], [5] * 6):
        with torch.no_grad():
            _, state = stream(model, x[:, :30], sizes, keep)
        y, _, aux = model(x[:, 30:], state)
        loss = F.cross_entropy(y[:, :-1].flatten(0, 1), x[:, 31:].flatten()) + 0.1 * aux.loss
        found.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    for other in found[1:]:
        for a, b in zip(found[0], other):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                _close(a, b, 1e-10)


def check_every_parameter_learns(model: Decoder, keep: Keep) -> None:
    x = draw_tokens()
    model.zero_grad()
    _, state, _ = model(x[:, :30], keep=keep)
    y, _, aux = model(x[:, 30:], state)
    (y.square().mean() + aux.loss).backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == [], f"parameters without a gradient: {idle}"


@torch.no_grad()
def check_rows_are_independent(model: Decoder, keep: Keep) -> None:
    x = draw_tokens()
    together = stream(model, x, 30, keep)[0]
    for row in range(2):
        _close(together[row : row + 1], stream(model, x[row : row + 1], 30, keep)[0], 1e-11)


@torch.no_grad()
def check_reset_rows_begin_again(model: Decoder, keep: Keep) -> None:
    x, y = draw_tokens(), draw_tokens(seed=2)
    _, state = stream(model, x, [31, 29], keep)
    emptied = model.reset_rows(state, torch.tensor([True, False, True]))
    after = stream(model, y, [25, 35], keep, emptied)[0]
    fresh, carried = model(y, keep=keep)[0], model(y, state)[0]
    _close(after[[0, 2]], fresh[[0, 2]], 1e-9)
    _close(after[1], carried[1], 1e-11)


@torch.no_grad()
def check_states_can_be_saved_forked_and_reordered(model: Decoder, keep: Keep) -> None:
    x, y = draw_tokens(), draw_tokens(seed=2)
    _, state = stream(model, x, 40, keep)
    want = model(y, state)[0]
    assert torch.equal(model(y, states.unpack(*states.pack(state)))[0], want), "a saved state differs"
    model(draw_tokens(seed=3), states.fork(state))
    assert torch.equal(model(y, state)[0], want), "using a state or its fork changed it"
    order = torch.tensor([2, 0, 0])
    _close(model(y[order], states.select_rows(state, order))[0], want[order], 1e-11)


@torch.no_grad()
def check_bytes_held(model: Decoder, keep: Keep) -> None:
    """The reported bytes are those that the state's tensors occupy, and no tensor is a view of a larger one."""
    _, state, aux = model(draw_tokens(), keep=keep)
    tensors = {name: x for name, x in states.pack(state)[0].items() if not name.endswith("evicted")}
    used = sum(x.numel() * x.element_size() for x in tensors.values())
    spare = 2 * used + 200_000 if any(".slots." in name for name in tensors) else 0
    assert used <= aux.bytes_held <= used + spare, f"{aux.bytes_held} bytes reported, {used} occupied"
    states.map_tensors(state, _check_storage)


def _check_storage(x: Tensor) -> Tensor:
    assert x.untyped_storage().nbytes() <= x.numel() * x.element_size() + 64, "a view of a large tensor holds all of it"
    return x


@torch.no_grad()
def check_memory_stays_flat(model: Decoder, keep: Keep) -> None:
    """For systems that declare a bounded state."""
    held, state = [], None
    for n in range(12):
        _, state, aux = model(draw_tokens(count=50, seed=n), state, keep=keep)
        held.append(aux.bytes_held)
    assert max(held[6:]) <= 1.5 * max(held[:3]), f"bytes held grow with the stream: {held}"


CHECKS: dict[str, Callable[[Decoder, Keep], None]] = {
    "reads the past": check_reads_the_past,
    "causal": check_causal,
    "any chopping": check_any_chopping,
    "gradients of any chopping": check_gradients_of_any_chopping,
    "every parameter learns": check_every_parameter_learns,
    "rows are independent": check_rows_are_independent,
    "reset rows begin again": check_reset_rows_begin_again,
    "states can be saved, forked and reordered": check_states_can_be_saved_forked_and_reordered,
    "bytes held": check_bytes_held,
    "memory stays flat": check_memory_stays_flat,
}
"""Every check by name. Gradients are checked with keep="hidden", as in training; all others with both contents of a state."""
LEARNING = ("gradients of any chopping", "every parameter learns")


def applies(name: str, kind: str, keep: Keep) -> bool:
    """Whether a check applies to a system with this content of its states.

    Only systems on the expiring-attention operator keep different contents for training and serving; others are checked once.
    """
    if name == "memory stays flat" and not find(kind).bounded:
        return False
    if name in LEARNING:
        return keep == "hidden"
    return keep == "kv" or find(kind).operator


def check_system(kind: str, **fields: Any) -> None:
    """Run every check that applies to a registered memory system."""
    for keep in KEEPS:
        for name, check in CHECKS.items():
            if applies(name, kind, keep):
                torch.manual_seed(0)
                check(Decoder(small_config(kind, **fields)).double().train(keep == "hidden"), keep)
