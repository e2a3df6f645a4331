"""Models whose blocks are read in parts, by several processes or one after another, learn what one process learns."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.decoder import Decoder
from expire_span.models.state import detach, fork
from expire_span.models.systems.expire_span import ExpireSpanConfig, HeadReach, PaperDetails
from expire_span.ops.context import ContextGroup, backward_in_pieces, context_parallel
from expire_span.recipes import text_tiny
from expire_span.runs import RunFolder
from expire_span.settings.run import DecoderConfig
from expire_span.train.context import check_one_config, check_parts
from expire_span.train.regroup import Layout, regroup
from expire_span.train.step_metrics import StepMetrics
from expire_span.train.supervised import check_rows, train
from tests.error_budget import DOUBLE
from tests.forked import fork_several
from tests.ranks import Ranks
from tests.tiny import as_options, spawn, tiny_config, write_text
from tests.train.test_ddp import SAME, call, check_same, free_port, launcher, lines

BLOCK, BATCH, VOCAB = 48, 2, 11
LAYERS = {
    "one span a layer": dict(max_span=40, ramp=4, initial_span=0.4),
    "spans of each head, learned reach": dict(
        max_span=60,
        ramp=4,
        initial_span=0.3,
        span_per="kv_head",
        reach=HeadReach(learned=True, own_heads=1, spread=4.0),
    ),
    "without self": dict(max_span=30, ramp=5, initial_span=0.5, span_loss="l1", paper=PaperDetails(include_self=False)),
}


def build(layer: str, **model: Any) -> Decoder:
    torch.manual_seed(1)
    mixer = ExpireSpanConfig(**LAYERS[layer])
    shape: dict[str, Any] = dict(vocab=VOCAB, dim=12, layers=2, heads=2, kv_heads=2, ff_dim=16, mixer=mixer)
    decoder = Decoder(DecoderConfig.modern(**(shape | model))).double()
    with torch.no_grad():
        for block in decoder.layers():  # spans that differ from token to token
            block.mixer.span_predictor.weight.normal_(std=2.0)  # type: ignore[union-attr]
    return decoder


def blocks(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (BATCH, BLOCK + 1), generator=draw) for _ in range(count)]


def loss_of(decoder: Decoder, x: Tensor, y: Tensor, state: Any, keep: Any, share: int) -> tuple[Tensor, Tensor, Any]:
    """The task loss as this part's share of the block's mean, and a loss whose mean over parts is that of the block."""
    logits, state, aux = decoder(x, state, keep=keep)
    nll = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    return nll / share, (nll + 0.1 * aux.loss), state


def learn(
    group: Any, layer: str, carry: bool, steps: int, model: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of each step and the weights at the end. group: a process group, or None for one process."""
    context = None if group is None else ContextGroup(group)
    size = 1 if context is None else context.size
    decoder, state, losses = build(layer, **model), None, []
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    for block in blocks(steps):
        pair = (block[:, :-1], block[:, 1:])
        x, y = pair if context is None else map(context.shard, pair)
        with nullcontext() if context is None else context_parallel(context):
            nll, loss, state = loss_of(decoder, x, y, state if carry else None, "hidden" if carry else "nothing", size)
            (loss / size).backward()
        state = detach(state)
        gradients = [p.grad for p in decoder.parameters()]
        if group is not None:
            for x in [nll := nll.detach(), *gradients]:
                dist.all_reduce(x, group=group)
        losses.append(float(nll.detach()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return losses, {name: p.detach() for name, p in decoder.named_parameters()}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as found:
        yield found


@pytest.mark.parametrize(
    ("layer", "carry", "size", "steps"),
    [
        ("one span a layer", True, 2, 50),
        ("spans of each head, learned reach", True, 3, 8),
        ("spans of each head, learned reach", False, 4, 8),
        ("without self", True, 4, 8),
        *[pytest.param(x, y, n, 50, marks=pytest.mark.long) for x in LAYERS for y in (True, False) for n in (2, 3, 4)],
    ],
)
def test_processes_that_share_rows_learn_what_one_learns(ranks, layer, carry, size, steps):
    losses, weights = learn(None, layer, carry, steps, {})
    for found, learned in ranks.call(learn, size, layer, carry, steps, {}, patience=max(30, 6 * steps)):
        assert found == pytest.approx(losses, abs=1e-6)
        for name, x in weights.items():
            torch.testing.assert_close(learned[name], x, rtol=1e-6, atol=1e-6)


def go_on(group: Any, weights: dict[str, Tensor], states: list[Any], steps: list[int]) -> tuple[list[float], Any, Any]:
    """Losses of some steps, from the given weights and this process's state on; the weights and the state afterwards."""
    context = ContextGroup(group)
    decoder, state, losses = build("spans of each head, learned reach"), states[context.rank], []
    decoder.load_state_dict(weights)
    for step in steps:
        block = blocks(step + 1)[-1]
        with context_parallel(context):
            x, y = context.shard(block[:, :-1]), context.shard(block[:, 1:])
            nll, loss, state = loss_of(decoder, x, y, state, "hidden", context.size)
            (loss / context.size).backward()
        state = detach(state)
        for x in [nll := nll.detach(), *(p.grad for p in decoder.parameters())]:
            dist.all_reduce(x, group=group)
        losses.append(float(nll))
        with torch.no_grad():
            for p in decoder.parameters():
                p -= 0.1 * p.grad  # type: ignore[operator]
                p.grad = None
    return losses, {name: p.detach() for name, p in decoder.named_parameters()}, state


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 1)])
def test_losses_go_on_as_those_of_one_process(ranks, old, new):
    """In float64; the memories that the first processes left cross to other ones."""
    start = {name: p.detach() for name, p in build("spans of each head, learned reach").named_parameters()}
    want, *_ = ranks.call(go_on, 1, start, [None], [0, 1, 2, 3, 4, 5])[0]
    first = ranks.call(go_on, old, start, [None] * old, [0, 1, 2])
    window = {"rows": None, "counts": [], "units": []}
    workers = [{"states": [fork(state)], "window": window, "random": {}} for _, _, state in first]
    states = [regroup(workers, Layout(old, old), Layout(new, new), n, 2)["states"][0] for n in range(new)]
    second = ranks.call(go_on, new, first[0][1], states, [3, 4, 5])
    assert first[0][0] + second[0][0] == pytest.approx(want, abs=1e-6)


def test_relative_positions_and_the_paper_preset(ranks):
    losses, _ = learn(None, "without self", True, 4, dict(positions="relative", relative_window=9))
    for found, _ in ranks.call(learn, 2, "without self", True, 4, dict(positions="relative", relative_window=9)):
        assert found == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
def test_pieces_give_the_gradients_of_the_whole(layer, pieces):
    block = blocks(1)[0]
    x, y = block[:, :-1], block[:, 1:]
    decoder = build(layer)
    loss_of(decoder, x, y, None, "nothing", 1)[1].backward()
    want = {name: p.grad for name, p in decoder.named_parameters()}
    decoder.zero_grad()

    def of_piece(n: int) -> Tensor:
        part = [z.chunk(pieces, 1)[n] for z in (x, y)]
        return loss_of(decoder, part[0], part[1], None, "nothing", 1)[1] / pieces

    backward_in_pieces(of_piece, pieces)
    for name, p in decoder.named_parameters():
        assert want[name] is not None and p.grad is not None, name
        assert float((p.grad - want[name]).abs().max()) < DOUBLE, name


def test_pieces_hold_the_activations_of_one_piece():
    """What autograd keeps at a time grows with the piece, not with the sequence."""
    decoder, block = build("one span a layer"), torch.cat(blocks(8), 1)
    most, now = [0], [0]

    def of_piece(pieces: int) -> Any:
        def loss(n: int) -> Tensor:
            now[0] = 0
            x, y = (z.chunk(pieces, 1)[n] for z in (block[:, :384], block[:, 1:385]))
            return loss_of(decoder, x, y, None, "nothing", 1)[1]

        return loss

    def note(x: Tensor) -> Tensor:
        now[0] += x.numel()
        most[0] = max(most[0], now[0])
        return x

    held = {}
    for pieces in (1, 8):
        most[0] = 0
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            backward_in_pieces(of_piece(pieces), pieces)
        held[pieces] = most[0]
    assert held[8] < 0.35 * held[1]


def test_training_in_pieces_equals_training_at_once(tmp_path):
    """Through the whole training loop, dropout's random numbers included: they are those of the first reading."""
    text = write_text(tmp_path)
    options: dict[str, Any] = dict(steps=4, log_every=1, eval_every=4, carry=False, block=32, span_weight=0.1)
    one = train(tiny_config(text, **options), tmp_path / "one", shown=False)
    four = train(tiny_config(text, **options, pieces=4, eval_block=32), tmp_path / "four", shown=False)
    check_same(lines(one.path), lines(four.path))


@pytest.mark.slow
def test_two_processes_share_rows_through_the_command_line(tmp_path):
    check_shared(tmp_path, "forked", steps=4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_launched_processes_share_rows_and_resume_exactly(tmp_path, kind):
    run = check_shared(tmp_path, kind, steps=10)
    before = (run.path / "metrics.jsonl").read_bytes()
    shutil.rmtree(run.checkpoints / "step-00000010")
    (run.path / "result.json").unlink()
    code, output = call(kind, "resume", str(run.path))
    assert code == 0, output
    assert (run.path / "metrics.jsonl").read_bytes() == before


def check_shared(tmp_path: Path, kind: str, steps: int) -> RunFolder:
    options: dict[str, Any] = dict(steps=steps, log_every=1, eval_every=steps // 2, checkpoint_every=4, block=16)
    config = tiny_config(write_text(tmp_path), **options, accumulate=2, span_weight=0.1)
    one = train(config, tmp_path / "one", shown=False)
    shared = replace(config, train=replace(config.train, context_parallel=2))
    args = ["train", "text_tiny", "--runs-dir", str(tmp_path), "--name", "two", *as_options(shared, text_tiny())]
    code, output = call(kind, *args)
    assert code == 0, output
    two = RunFolder.open(tmp_path / "two")
    check_same(without_bytes(one), without_bytes(two))
    assert two.read_result()["loss"] == pytest.approx(one.read_result()["loss"], rel=SAME)  # type: ignore[index]
    return two


def without_bytes(run: RunFolder) -> list[dict]:
    """Lines of metrics; two stores of half of the memories each have more empty slots than one of all."""
    return [{**line, "bytes_held": 0} for line in lines(run.path)]


REFUSED = [
    (dict(model={"layer_drop": 0.1}), "layer_drop skips a layer for all tokens at once"),
    (dict(mixer=dict(cap=5)), "cap with carry needs the whole block"),
    (dict(mixer=dict(paper=PaperDetails(noisy=True))), "paper.noisy needs the whole block"),
    (dict(mixer=dict(paper=PaperDetails(initial_memories=2))), "paper.initial_memories needs the whole block"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_what_cannot_be_shared_is_refused_by_name(tmp_path, given, words):
    config = tiny_config(tmp_path, given.get("model"), context_parallel=2)
    mixer = replace(config.model.mixer, **given.get("mixer", {}))
    with pytest.raises(ValueError, match=f"{words}.*got context_parallel 2"):
        check_parts(replace(config, model=replace(config.model, mixer=mixer)))


def test_other_memory_systems_are_refused(tmp_path):
    from expire_span.models.systems import mixer_config

    config = tiny_config(tmp_path, context_parallel=2)
    other = replace(config, model=replace(config.model, mixer=mixer_config("sliding_window")))
    with pytest.raises(ValueError, match="the memory system sliding_window needs the whole block"):
        check_parts(other)


class Gathering:
    """What training asks of accelerate, for the ranks of a test."""

    def __init__(self, group: Any) -> None:
        self.group, self.num_processes, self.device = group, dist.get_world_size(group), torch.device("cpu")

    def gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.num_processes)]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts)


def with_other_settings(group: Any, folder: Path) -> str:
    config = tiny_config(folder, lr=1e-3 if dist.get_rank(group) < 2 else 2e-3)
    try:
        check_one_config(config, Gathering(group))  # type: ignore[arg-type]
        return "nothing"
    except ValueError as error:
        return str(error)


def test_different_settings_are_told_to_every_process(ranks, tmp_path):
    told = ranks.call(with_other_settings, 3, tmp_path)
    assert len(set(told)) == 1
    assert "all processes must be given the same settings, got other ones in process 2 than in process 0" in told[0]
    assert ranks.call(with_other_settings, 2, tmp_path) == ["nothing", "nothing"]


def with_nan(group: Any) -> Any:
    """A step in which one rank's weights hold a NaN: what every rank is told of it at the next line of metrics."""
    context, metrics = ContextGroup(group), StepMetrics(2)
    decoder, block = build("one span a layer"), blocks(1)[0]
    if context.rank == 1:
        with torch.no_grad():
            decoder.embed.weight.fill_(math.nan)
    with context_parallel(context):
        logits, _, aux = decoder(context.shard(block[:, :-1]), keep="nothing")
        nll = F.cross_entropy(logits.flatten(0, 1), context.shard(block[:, 1:]).flatten())
        (nll + aux.loss).backward()
    sums = {"nll": nll.detach(), "correct": nll.detach(), "span_loss": aux.loss.detach()}
    sums |= {"live": aux.live, "span": torch.zeros(2)}
    metrics.add([sums], torch.zeros(()), torch.ones(()), BLOCK, BLOCK)
    found = metrics.find_fault(Gathering(group))  # type: ignore[arg-type]
    return None if found is None else found[:3]


def test_nan_on_one_process_is_told_to_every_process(ranks):
    assert ranks.call(with_nan, 3) == [(0, 1, 0)] * 3


def test_numbers_that_do_not_divide_are_refused(tmp_path):
    with pytest.raises(ValueError, match="context_parallel must divide block, got context_parallel 3 and block 8"):
        tiny_config(tmp_path, context_parallel=3)
    with pytest.raises(ValueError, match="pieces need blocks that begin without memory, got carry True"):
        tiny_config(tmp_path, pieces=2)
    with pytest.raises(ValueError, match="got context_parallel 2 and pieces 2"):
        tiny_config(tmp_path, context_parallel=2, pieces=2, carry=False)
    with pytest.raises(ValueError, match="got context_parallel 4 and 2 processes"):
        check_rows(tiny_config(tmp_path, context_parallel=4).train, 2)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["forked", "ddp"])
def test_a_killed_process_ends_the_others_and_the_run_resumes_exactly(tmp_path, kind):
    """The short twin, test_a_killed_rank_ends_the_others_with_a_sentence in tests/ops/test_context.py, has no run."""
    options: dict[str, Any] = dict(
        steps=100, log_every=1, eval_every=100, checkpoint_every=10, keep_checkpoints=2, block=16
    )
    config = tiny_config(write_text(tmp_path), **options, context_parallel=2)
    start = ["train", "text_tiny", "--runs-dir", str(tmp_path), *as_options(config, text_tiny())]
    code, output = call(kind, *start, "--name", "whole")
    assert code == 0, output
    start += ["--name", "killed"]
    ranks = fork_several(*start, port=free_port()) if kind == "forked" else []
    process = ranks[0] if ranks else spawn(*start, launcher=launcher(kind))
    first = tmp_path / "killed" / "checkpoints" / "step-00000010"
    deadline = time.monotonic() + 90
    while not first.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    os.kill(ranks[1].pid if ranks else children_of(process.pid)[-1], signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert process.returncode != 0 and "another process of this run has ended" in out + err, out + err
    code, output = call(kind, "resume", str(tmp_path / "killed"))
    assert code == 0, output
    one, two = (tmp_path / name / "metrics.jsonl" for name in ("whole", "killed"))
    assert one.read_bytes() == two.read_bytes()


def children_of(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
