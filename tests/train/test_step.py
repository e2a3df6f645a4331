"""A training pass: the same loss and gradients as by hand; on a GPU, the same when replayed as a graph."""

import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from expire_span.models.decoder import Decoder
from expire_span.models.state import detach
from expire_span.models.systems.expire_span import PaperDetails
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig
from expire_span.testing import small_config
from expire_span.train.scorer import Scorer
from expire_span.train.step import MOST_GRAPHS, Pass, TrainStep
from tests.models.test_mixers import SMALL

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PAPER = DecoderConfig.paper(
    vocab=256, dim=64, layers=2, heads=2, ff_dim=64, relative_window=16,
    mixer=ExpireSpanConfig(max_span=200, ramp=8, initial_span=0.3, paper=PaperDetails(include_self=False, initial_memories=16)),
)  # fmt: skip
MODERN = DecoderConfig.modern(
    vocab=256, dim=64, layers=2, heads=2, ff_dim=64, mixer=ExpireSpanConfig(max_span=200, ramp=8)
)


def served(kind: str) -> DecoderConfig:
    """A small decoder of this kind with a head dim that the kernels support."""
    return replace(small_config(kind), dim=64, heads=2)


RECORDABLE = [k for k in SMALL if Decoder(served(k)).to(DEVICE).layers()[0].mixer.recordable().alone]


def build(config, graphs):
    torch.manual_seed(0)
    scorer = Scorer(Decoder(config).to(DEVICE)).train()
    return scorer, TrainStep(scorer, torch.Tensor.backward, graphs=graphs)


def passes(count, block=32):
    torch.manual_seed(1)
    scale, weight = torch.tensor(1 / (4 * block), device=DEVICE), torch.tensor(1e-3, device=DEVICE)
    for _ in range(count):
        tokens = torch.randint(0, 256, (4, block + 1), device=DEVICE)
        mask = torch.ones(4, block, dtype=torch.bool, device=DEVICE)
        yield Pass(tokens[:, :-1], tokens[:, 1:], mask, None, None, scale, weight, True)


def descend(scorer) -> None:
    """One step of plain gradient descent, with the gradients gone after it."""
    with torch.no_grad():
        for p in scorer.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
            p.grad = None


def train(config, graphs, count=24):
    """Losses of a few dozen steps of plain gradient descent with carried memory, and the last widths."""
    scorer, step = build(config, graphs)
    losses, state = [], None
    for given in passes(count):
        sums, state, held = step(replace(given, state=state))
        assert held > 0
        losses.append(float(sums["nll"]))
        descend(scorer)
    return torch.tensor(losses), [part["memory"].hidden.shape for part in state], step


@pytest.mark.parametrize("config", [PAPER, MODERN], ids=["paper", "modern"])
def test_a_pass_is_the_scorers_loss_and_gradient(config):
    scorer, step = build(config, graphs=False)
    first, second = passes(2)
    _, state, _ = step(first)
    scorer.zero_grad()
    sums, _, _ = step(replace(second, state=state))
    got = {name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None}
    scorer.zero_grad()
    want, _, _ = scorer(second.x, second.y, second.mask, detach(state))
    (want["nll"] * second.scale + want["span_loss"] * second.weight).backward()
    torch.testing.assert_close(sums["nll"], want["nll"].detach())
    assert not sums["nll"].requires_grad
    for name, p in scorer.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(got[name], p.grad, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("config", [PAPER, MODERN], ids=["paper", "modern"])
def test_replayed_steps_train_like_ordinary_ones(config):
    plain, widths, _ = train(config, graphs=False)
    graphed, graphed_widths, step = train(config, graphs=True)
    assert widths == graphed_widths
    torch.testing.assert_close(graphed, plain, rtol=1e-4, atol=1e-3)
    assert 0 < sum(r is not None for r in step.recordings.values()) <= MOST_GRAPHS


def widen_until_all_recordings_are_dropped(step: TrainStep) -> None:
    """Repeat a first shape, so that it is recorded; then, after more other shapes than are kept, repeat one of these."""
    shapes = [16, 16, *(16 * n for n in range(2, MOST_GRAPHS + 4)), 32]
    for block in shapes:
        (given,) = passes(1, block)
        step(replace(given, remember=False))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
def test_a_shape_is_recorded_after_all_earlier_recordings_were_dropped():
    _, step = build(MODERN, graphs=True)
    widen_until_all_recordings_are_dropped(step)
    assert sum(r is not None for r in step.recordings.values()) == 1


def test_a_memory_pool_is_not_used_again_once_no_graph_uses_it(monkeypatch):
    """The same with PyTorch's rule in place of a GPU: a pool whose last graph is gone is refused."""
    users: dict[object, weakref.WeakSet] = {}

    class Graph:
        def replay(self) -> None: ...

    @contextmanager
    def record(graph, pool):
        assert pool not in users or len(users[pool]), "this pool has no graph any longer"
        users.setdefault(pool, weakref.WeakSet()).add(graph)
        yield

    monkeypatch.setattr("expire_span.train.step.record_graph", record)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    _, step = build(MODERN, graphs=True)
    widen_until_all_recordings_are_dropped(step)
    assert len(users) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
def test_replays_draw_new_dropout():
    config = replace(MODERN, dropout=0.5)
    scorer, step = build(config, graphs=True)
    given, state, losses = next(passes(1)), None, []
    for _ in range(12):
        sums, state, _ = step(replace(given, state=state))
        losses.append(float(sums["nll"]))
        scorer.zero_grad(set_to_none=True)
    assert any(r is not None for r in step.recordings.values())
    assert len(set(losses[-4:])) == 4


def train_alone(kind: str, graphs: bool, count: int = 6) -> tuple[list[float], TrainStep]:
    """Losses of a few steps of plain gradient descent on sequences that stand alone."""
    scorer, step = build(served(kind), graphs)
    losses = []
    for given in passes(count, block=96):
        sums, state, _ = step(replace(given, x=given.x % 40, y=given.y % 40, remember=False))
        assert state is None
        losses.append(float(sums["nll"]))
        descend(scorer)
    return losses, step


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", RECORDABLE)
def test_replayed_steps_of_sequences_that_stand_alone(kind):
    plain, _ = train_alone(kind, graphs=False)
    replayed, step = train_alone(kind, graphs=True)
    torch.testing.assert_close(torch.tensor(replayed), torch.tensor(plain), rtol=1e-4, atol=1e-3)
    assert any(r is not None for r in step.recordings.values())


def test_only_what_the_kernels_serve_is_recorded(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as if there were a device that runs them
    mixer = replace(MODERN.mixer, impl="triton")
    narrow, wide = replace(MODERN, heads=4), MODERN
    assert [Decoder(c).layers()[0].mixer.recordable().carried for c in (narrow, wide)] == [False, False]  # chunked
    assert Decoder(replace(wide, mixer=mixer)).layers()[0].mixer.recordable().carried
    assert not Decoder(small_config("gru")).layers()[0].mixer.recordable().alone
    assert Decoder(small_config("full")).layers()[0].mixer.recordable().alone
    assert not Decoder(small_config("full")).layers()[0].mixer.recordable().carried
    # The paper preset has learned relative positions, with which passes cannot be recorded.
    assert not Decoder(small_config("forgetting", "paper")).layers()[0].mixer.recordable().alone
