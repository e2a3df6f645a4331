"""Replay: steps that were played one at a time are read again as blocks, for the gradient, from the state before the window.

A window may hold the end of one episode and the beginning of the next. Layers that can tell episodes apart read it at once,
with no attention between them. For all others each row is cut there into fragments of one episode each. A fragment that
continues an episode starts from the stored state, one that begins an episode from an empty state. Reading a block gives the
same probabilities and values as playing it did, since a memory that had expired in play has a mask of zero here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from expire_span.models.lifetimes import Lifetimes
from expire_span.models.mixer import MixerAux
from expire_span.models.observations import Observation
from expire_span.models.policy import Policy
from expire_span.models.state import select_rows
from expire_span.store import trim_states

from .credit import HeadWatch


@dataclass
class Window:
    """T steps of B environments. Tensors are [T, B, ..]."""

    state: list[Any]
    """The policy's state before the first step."""
    begins: Tensor
    """Whether a step is the first of its episode."""
    observation: Observation
    actions: Tensor
    """[T, B, K]."""
    log_prob: Tensor
    """Log probability of the actions under the policy that played."""
    value: Tensor
    advantage: Tensor
    target: Tensor
    """Target of the value: advantage plus predicted value."""
    expert: Tensor | None = None
    """The expert's actions [T, B, K] while the agent imitates it, else None."""
    reward: Tensor | None = None
    """Rewards in units of their spread, where the policy predicts them, else None."""

    @property
    def rows(self) -> int:
        return self.begins.shape[1]

    def take(self, rows: list[int] | None) -> Window:
        """Some rows of the window; None is all of them."""
        if rows is None:
            return self
        chosen = torch.tensor(rows, device=self.begins.device)
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("state", "observation")}
        parts = {name: None if x is None else x[:, chosen] for name, x in parts.items()}
        seen = {name: x[:, chosen] for name, x in self.observation.items()}
        return Window(state=select_rows(self.state, chosen), observation=seen, **parts)  # type: ignore[arg-type]


@dataclass
class Fragments:
    """Parts of a window's rows that belong to one episode each; every tensor is [n], on the host."""

    row: Tensor
    first: Tensor
    length: Tensor
    goes_on: Tensor
    """Whether the episode began before the window."""

    def take(self, chosen: Tensor) -> Fragments:
        """Those that are marked in `chosen` [n] (bool)."""
        return Fragments(*(getattr(self, f.name)[chosen] for f in fields(self)))


def cut(begins: Tensor) -> Fragments:
    """Cut every row of a window [T, B] where an episode begins; in order of rows, then of time."""
    starts = begins.t().cpu()  # [B, T]
    goes_on = ~starts
    starts = starts.clone()
    starts[:, 0] = True
    row, first = starts.nonzero(as_tuple=True)
    last_of_row = torch.cat([row[1:] != row[:-1], torch.ones(1, dtype=torch.bool)])
    stop = torch.where(last_of_row, starts.shape[1], first.roll(-1))
    return Fragments(row, first, stop - first, goes_on[row, first])


@dataclass
class Replayed:
    """The policy's outputs for the N steps of a window. Tensors are [N, ..], in the order that `index` gives."""

    log_prob: Tensor
    """Log probability of the actions that were taken."""
    value: Tensor
    entropy: Tensor
    expert_log_prob: Tensor | None
    """Log probability of the expert's actions; None without an expert."""
    span: Tensor
    """Mean span of each step's memory over the layers that learn a span per token; zero where none does."""
    reward: Tensor | None
    """Predicted rewards of the actions that were taken; None where the policy predicts none."""
    other_price: Tensor
    """Span loss of layers that do not learn a span per token, such as Adaptive-Span's (a scalar)."""
    index: Tensor
    """Place of each entry in the flattened window [T * B]."""


def replay(policy: Policy, window: Window) -> Replayed:
    """Read a window at once where all layers can tell episodes apart, else the fragments of its rows as blocks."""
    encoded = policy.encoder(window.observation).flatten(0, 1)  # [T * B, C], each step once
    if all(block.mixer.reads_episodes for block in policy.layers()):
        return _read_whole(policy, window, encoded)
    return _read_fragments(policy, window, encoded)


def _read_whole(policy: Policy, window: Window, encoded: Tensor) -> Replayed:
    count = len(window.begins)
    episodes = window.begins.t().cumsum(1)  # [B, T]
    places = torch.arange(count * window.rows, device=encoded.device).view(count, window.rows).t()  # [B, T]
    state = [{**part, "episodes": episodes} for part in trim_states(window.state)]
    return _read_places(policy, window, encoded, places, None, state)


def _read_fragments(policy: Policy, window: Window, encoded: Tensor) -> Replayed:
    fragments, parts = cut(window.begins), []
    for goes_on in (True, False):
        group = fragments.take(fragments.goes_on == goes_on)
        if len(group.row):
            parts.append(_read(policy, window, encoded, group, goes_on))
    return _join(parts)


def _read(policy: Policy, window: Window, encoded: Tensor, group: Fragments, goes_on: bool) -> Replayed:
    device, longest = window.begins.device, int(group.length.max())
    rows, firsts, lengths = group.row, group.first, group.length
    time = torch.arange(longest)
    mask = time < lengths[:, None]  # [n, longest]; padding behind a fragment's end is read, but not used
    places = torch.minimum(firsts[:, None] + time, (firsts + lengths - 1)[:, None]) * window.rows + rows[:, None]
    mask, places = mask.to(device), places.to(device)
    state = select_rows(window.state, rows) if goes_on else None
    return _read_places(policy, window, encoded, places, mask, state)


def _read_places(
    policy: Policy, window: Window, encoded: Tensor, places: Tensor, mask: Tensor | None, state: list[Any] | None
) -> Replayed:
    """Read the steps at these places [n, T] of the flattened window as blocks. mask: those that count; None: all."""
    chosen = (lambda x: x[mask]) if mask is not None else (lambda x: x.flatten(0, 1))
    head = HeadWatch(policy.action_head)
    with SpanWatch(policy) as spans:
        choices, value, _, aux = policy.read(encoded[places], state, keep="hidden" if state is not None else "nothing")
    head.close()
    taken = lambda actions: chosen(choices.log_prob(actions.flatten(0, 1)[places]))  # noqa: E731
    reward = None
    if window.reward is not None:
        reward = chosen(policy.predict_reward(head.read, window.actions.flatten(0, 1)[places]))
    expert = None if window.expert is None else taken(window.expert)
    span = spans.mean(places.shape[1])
    span = torch.zeros_like(value) if span is None else span
    read = (taken(window.actions), chosen(value), chosen(choices.entropy()), expert, chosen(span), reward)
    return Replayed(*read, _other_price(policy, aux.layers, value), chosen(places))


def _other_price(policy: Policy, layers: list[MixerAux], value: Tensor) -> Tensor:
    """Sum of span losses that do not depend on single steps, such as Adaptive-Span's."""
    known = [_rule_of(block.mixer) is not None for block in policy.layers()]
    losses = [aux.loss for aux, counted in zip(layers, known) if aux.loss is not None and not counted]
    return torch.stack(losses).sum(0).mean() if losses else value.new_zeros(())


def _join(parts: list[Replayed]) -> Replayed:
    optional = {}
    for name in ("expert_log_prob", "reward"):
        found = [x for p in parts if (x := getattr(p, name)) is not None]
        optional[name] = torch.cat(found) if found else None
    many = {n: torch.cat([getattr(p, n) for p in parts]) for n in ("log_prob", "value", "entropy", "span", "index")}
    price = torch.stack([p.other_price for p in parts]).mean()
    return Replayed(other_price=price, **optional, **many)


def _rule_of(mixer: nn.Module) -> Lifetimes | None:
    rule = getattr(mixer, "span_predictor", None)
    return rule if isinstance(rule, Lifetimes) else None


class SpanWatch:
    """A context manager that collects the spans of a policy's layers, with their gradients, by forward hooks.

    The span loss that a layer reports averages over all steps of a block; in replay the padding behind a fragment's end must
    not count, so the loss is computed from these spans instead.
    """

    def __init__(self, policy: Policy) -> None:
        self.rules = [rule for block in policy.layers() if (rule := _rule_of(block.mixer)) is not None]
        self.spans: list[Tensor] = []

    def __enter__(self) -> SpanWatch:
        self.hooks = [rule.register_forward_hook(self._note) for rule in self.rules]
        return self

    def _note(self, module: nn.Module, given: Any, span: Any) -> None:
        self.spans.append(span)

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def mean(self, count: int) -> Tensor | None:
        """The mean span over layers and heads of the last `count` steps, [B, count]; None without learned spans."""
        if not self.spans:
            return None
        new = [span[..., -count:].transpose(1, 2) for span in self.spans]  # [B, count, P]
        by_layer = [r.mean_over_heads(x.flatten(0, 1)).view(x.shape[:2]) for r, x in zip(self.rules, new)]
        return torch.stack(by_layer).mean(0)
