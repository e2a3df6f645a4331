"""The fused decoding step equals the plain one in its outputs and in the slots. It runs on a GPU, or interpreted."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch

from expire_span.models.decoder import Decoder
from expire_span.models.slot_step import SlotStep
from expire_span.models.stepping import Stepper
from expire_span.models.systems.expire_span import HeadReach
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig
from expire_span.store.slots import DEAD, FRESH, Slots
from expire_span.stream import Stream
from tests.error_budget import reordered
from tests.stream_cases import CASES, build
from tests.triton_interpreter import DEVICE, ON_GPU, compaction, products, slot_tiles, slots

LEAST = reordered(400, depth=13)
"""Outputs of about 1 after at most two layers of six sums each and a head, over at most 400 memories; 5e-5 on any device."""


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def advance(decoder: Decoder, rows: int, steps: int) -> Stepper:
    stepper = Stepper(decoder, rows)
    tokens = torch.randint(256, (steps, rows), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    clock = stepper.clock
    clock.epochs += 1000 * torch.arange(rows, device=DEVICE)  # rows that have read different numbers of tokens
    clock.turn_to_epoch()
    for token in tokens:
        if clock.column == FRESH:
            for memory in stepper.memories:
                memory.make_room(memory.most)
            stepper.compact()
            clock.epoch, clock.column = clock.epoch + FRESH, 0
            for memory in stepper.memories:
                memory.note_counts(memory.slots.counts)
        stepper.logits(token)
        clock.column += 1
        clock.on_device += 1
    return stepper


def fused(layer: SlotStep, h: torch.Tensor, programs: int) -> torch.Tensor:
    """One step, with so many programs for the first head, one fewer for the second, .., at least one."""
    division = slot_tiles.divide([max(programs - n, 1) for n in range(layer.kv_heads)], layer.group, len(h), DEVICE)
    r, shared = layer.rules, dict(group=layer.group, fresh=FRESH, scale=layer.scale, qk_norm=layer.normed)
    gates = 0 if layer.gate_bias is None else layer.heads
    weight = layer.weight[: (layer.heads + 2 * layer.kv_heads) * layer.head_dim + gates]
    angles = (layer.clock.cos, layer.clock.sin) if layer.turned else None
    proj = h @ weight.T
    y = slots.triton_step(
        proj, h, layer.form, slots.Fields(*layer.memory.fields), layer.clock.on_device, division,
        ramp=r.ramp, angles=angles, include_self=r.include_self, relative_keys=layer.relative, normalizer_eps=r.normalizer_eps,
        gate_bias=layer.gate_bias, **shared,
    )  # fmt: skip
    assert not division.finished.any()  # ready for the next step
    return layer._without_own(y, proj)


@pytest.mark.parametrize(
    "name, programs, tiles",
    [
        *((name, programs, {}) for name, programs in zip(CASES, [1, 3] * 4)),
        ("paper preset", 3, dict(skip_dead=False)),
        ("spans below zero", 1, dict(slots=16)),
    ],
)
@torch.inference_mode()
def test_the_fused_step_equals_the_plain_one(name, programs, tiles, monkeypatch):
    monkeypatch.setattr(slot_tiles, "_tiles", slot_tiles.SlotTiles(**tiles))
    monkeypatch.setattr("expire_span.models.slot_step.slot_kernel_serves", lambda impl, like: False)
    stepper = advance(build(name).to(DEVICE), 2, FRESH + 40)
    layer = stepper.layers[0]
    h = torch.randn(2, layer.mixer.shape.dim, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2))
    before = {k: x.clone() for k, x in layer.memory.slots.tensors().items()}
    wanted = layer._plain_step(h)
    after = {k: x.clone() for k, x in layer.memory.slots.tensors().items()}
    for key, x in layer.memory.slots.tensors().items():
        x.copy_(before[key])
    found = fused(layer, h, programs)
    torch.testing.assert_close(found, wanted, rtol=0, atol=LEAST)
    for key, x in layer.memory.slots.tensors().items():
        torch.testing.assert_close(x, after[key], rtol=1e-5, atol=LEAST, msg=f"{name} {key}")
    assert not torch.equal(after["k"], before["k"])


def random_slots(rows: int, capacity: tuple[int, ...]) -> Slots:
    """Slots whose fresh ones are full and whose older ones are partly full; about half of the memories are dead."""
    draw, here = torch.Generator().manual_seed(len(capacity)), Slots(rows, 16, capacity, ramp=4.0, device=DEVICE)
    for name in ("k", "v"):
        getattr(here, name).copy_(torch.randn(here.k.shape, generator=draw))
    for row in range(rows):
        for head, (begin, size) in enumerate(zip(here.starts, capacity)):
            count = min(int((size + 1) * torch.rand((), generator=draw)), size)
            here.counts[row, head] = count
            held = slice(begin + FRESH, begin + FRESH + count)
            here.pos[row, held] = -torch.randint(1, 300, (count,), generator=draw).float().to(DEVICE)
            here.span[row, held] = (600 * torch.rand(count, generator=draw)).round().to(DEVICE)
            here.span[row, begin : begin + FRESH] = (90 * torch.rand(FRESH, generator=draw)).round().to(DEVICE)
    return here


@pytest.mark.parametrize("capacity", [(64, 64), (64, 320, 640)])
def test_compaction_by_the_kernel_keeps_what_the_plain_one_keeps(capacity):
    """In some heads more is alive than fits: then as much is kept as there is room for, and no other head is touched."""
    mine = random_slots(2, capacity)
    plain = mine.grown([size + FRESH for size in capacity])
    plain.counts = plain.counts.clone()  # a grown copy shares it
    buffers = [x.data_ptr() for x in mine.tensors().values()]
    compaction.triton_compact(slots.Fields(*(getattr(mine, name) for name in slots.Fields._fields)), FRESH, mine.ramp)
    plain.compact()
    fits = plain.counts.clamp(max=torch.tensor(capacity, device=DEVICE))
    assert torch.equal(mine.counts, fits) and [x.data_ptr() for x in mine.tensors().values()] == buffers
    assert (plain.counts > fits).any() and (plain.counts == fits).any()
    for row in range(2):
        for head, begin in enumerate(mine.starts[:-1]):
            end, count = mine.starts[head + 1], int(fits[row, head])
            assert (mine.span[row, begin : begin + FRESH] == DEAD).all()
            assert (mine.span[row, begin + FRESH + count : end] == DEAD).all()
            assert torch.equal(mine.pos[row, begin : begin + FRESH].cpu(), torch.arange(FRESH).float())
            kept = memories_in(mine, row, begin, count)
            living = memories_in(plain, row, plain.starts[head], int(plain.counts[row, head]))
            assert len(set(kept)) == count and set(kept) <= set(living)


def memories_in(here: Slots, row: int, begin: int, count: int) -> list[tuple[float, ...]]:
    """The older slots in use: position, span, key and value of each."""
    part = slice(begin + FRESH, begin + FRESH + count)
    numbers = [here.pos[row, part, None], here.span[row, part, None], here.k[row, part], here.v[row, part]]
    return [tuple(memory) for memory in torch.cat(numbers, 1).tolist()]


@torch.inference_mode()
def test_a_stream_on_the_kernels_equals_the_undeleted_computation(monkeypatch):
    """Heads of unequal capacity, growth, compaction, a row that comes later: all that a GPU does, but for recording it."""
    monkeypatch.setattr("expire_span.models.slot_step.slot_kernel_serves", lambda impl, like: True)
    # The interpreter takes its time for each program: the long head has two at the end, all others one.
    monkeypatch.setattr(slot_tiles, "_tiles", slot_tiles.SlotTiles(programs=6))
    reach = HeadReach(learned=True, own_heads=1, spread=16.0)
    mixer = ExpireSpanConfig(max_span=400, ramp=6, initial_span=0.2, span_per="kv_head", reach=reach)
    decoder = build(DecoderConfig.modern(dim=32, layers=1, heads=2, ff_dim=32, mixer=mixer)).to(DEVICE)
    tokens = torch.randint(256, (2, 161), device=DEVICE)
    stream, found = Stream(decoder, 2), []
    engine = stream._engine
    engine.clock.set(0, FRESH - 4)
    stream.read([tokens[0, :150], tokens[0, :9]])
    for n, token in enumerate(tokens[:, 150:].unbind(1)):
        if n == 2:
            stream.join(tokens[1, : 150 + n], row=1)
        stream.feed(token)
        found.append(stream.logits)
    (memory,) = engine.stepper.memories
    assert memory.fused and not memory.slots.uniform and engine.clock.epoch >= FRESH
    wanted, logits = decoder(tokens)[0], torch.stack(found, 1)
    torch.testing.assert_close(logits[0], wanted[0, 150:], rtol=0, atol=LEAST)
    torch.testing.assert_close(logits[1, 2:], wanted[1, 152:], rtol=0, atol=LEAST)


def test_long_heads_are_read_by_more_programs_and_every_tile_by_one(monkeypatch):
    monkeypatch.setattr(slot_tiles, "_tiles", slot_tiles.SlotTiles(slots=64, programs=1056))
    count = slot_tiles.count_programs
    assert count([192] * 8, 1) == [3] * 8  # few rows: a tile for each program
    assert count([192] * 7 + [4000], 16) == [2] * 7 + [32]  # 16 x 84 tiles, two for each of at most 1,056 programs
    assert count([192] * 8, 256) == [1] * 8  # the rows fill the device: no head needs a second program
    assert count([192] * 7 + [4000], 256) == [1] * 7 + [3]
    assert count([10**6], 1) == [slot_tiles.MOST_PROGRAMS]
    division = slot_tiles.divide([1, 3, 2], 2, 5, "cpu")
    heads, firsts, steps = division.programs.unbind(1)
    assert heads.tolist() == [2, 2, 2, 3, 3, 3, 4, 4, 5, 5, 0, 1]  # the longest first
    for head in range(6):
        mine = heads == head
        assert firsts[mine].tolist() == list(range(int(mine.sum()))) and (steps[mine] == mine.sum()).all()
    assert division.finished.shape == (5, 6) and division.most == 3


def test_squared_relu():
    x = torch.randn(3, 700, device=DEVICE)
    wanted = x.relu().square()
    torch.testing.assert_close(slots.square_relu_(x), wanted)


def test_norm_product_and_activation_are_one_kernel():
    """Judged against float64, within the rounding of the inputs that the kernel makes once more, and of the output."""
    gen, step = torch.Generator(DEVICE).manual_seed(0), 2**-7  # of bfloat16; the interpreter cuts digits off
    for rows, width, outputs, square in ((1, 48, 24, False), (3, 300, 70, True), (70, 64, 130, True)):
        x, gain, weight = (
            torch.randn(shape, device=DEVICE, generator=gen).to(torch.bfloat16)
            for shape in ((rows, width), (width,), (outputs, width))
        )
        normed = torch.nn.functional.rms_norm(x.double(), (width,), gain.double(), 1e-6)
        wanted = normed @ weight.double().T
        error = step * (normed.abs() @ weight.double().abs().T)  # of rounding each normalised input, at most
        wanted, error = (wanted.relu() ** 2, 2 * wanted.relu() * error + error**2) if square else (wanted, error)
        folded = products.fold_gain(weight, gain)
        parts = x.double().square().tensor_split([1, width // 2], 1)
        for squares in (None, torch.stack([part.sum(1) for part in parts], 1).float()):
            found = products.norm_linear(x, squares, 1e-6, folded, square_relu=square).double()
            assert ((found - wanted).abs() <= error + step * wanted.abs()).all()
        y, h = torch.randn(rows, outputs, device=DEVICE, generator=gen).to(torch.bfloat16), x
        wanted = y.double() + h.double() @ weight.double().T
        squares = products.add_linear_(y, h, weight)
        torch.testing.assert_close(y.double(), wanted, rtol=step, atol=reordered(width, size=float(wanted.abs().max())))
        size = y.double().square().sum(1)
        torch.testing.assert_close(squares.double().sum(1), size, rtol=reordered(outputs), atol=0)


def test_products_are_cut_so_that_no_part_of_the_device_is_idle():
    assert products.choose_tiles(1, 512, 512) == products.FEW_ROWS
    assert products.choose_tiles(256, 2048, 512).outputs == 64 and products.choose_tiles(256, 1536, 512).outputs == 64
    assert products.choose_tiles(256, 512, 512).outputs == 32  # 64 programs: more of them would read more
    assert products.choose_tiles(256, 512, 2048).outputs == 16  # long sums: every multiprocessor is needed


@torch.inference_mode()
def test_a_step_of_half_precision_with_folded_norms_is_within_its_rounding(monkeypatch):
    """The same weights in float64 judge both: the folded step may err no more than twice what the plain one does."""
    decoder = build("spans per head").to(DEVICE).bfloat16()
    judge = copy.deepcopy(decoder).double()
    wanted = last_logits(judge)
    plain = (last_logits(decoder) - wanted).abs().max()
    monkeypatch.setattr("expire_span.models.slot_step.slot_kernel_serves", lambda impl, like: True)
    stepper = advance(decoder, 2, 0)
    assert all(layer.folded for layer in stepper.layers) and all(block.folded for block in stepper.blocks)
    folded = (last_logits(decoder) - wanted).abs().max()
    assert 0 < folded <= 2 * plain + 1e-3, (folded, plain)


def last_logits(decoder: Decoder) -> torch.Tensor:
    stepper = advance(decoder, 2, 2)
    return stepper.logits(torch.tensor([7, 9], device=DEVICE)).double()


CODE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from expire_span.ops.triton import compaction, products, slots

POINTERS = dict.fromkeys("counts bounds column programs finished gaps".split(), "i32")
POINTERS |= dict.fromkeys("weight bias low room gate_bias cos sin pos span".split(), "fp32")
POINTERS |= dict.fromkeys("parts peaks totals squares squares_of_y sinks".split(), "fp32")
FLOATS = ("scale", "ramp", "inv_ramp", "norm_eps", "hidden_eps", "eps")
SIZES = dict(FRESH=64, D=64, D_PAD=64, C_PAD=512, BLOCK_N=64, MOST=64, BLOCK=1024)
SIZES |= dict(STAGES=1, SKIP_DEAD=False)
MODERN = dict(QK_NORM=True, HIDDEN_NORM=True, ROTARY=True, MIN_AGE=0, WINDOW=0, EPS=0.0, GATES=1536, SQUASH=0, SINKS=False)
PAPER = dict(QK_NORM=False, HIDDEN_NORM=False, ROTARY=False, MIN_AGE=1, WINDOW=256, EPS=1e-8, GATES=0, SQUASH=0, SINKS=False)
HOSTED = MODERN | dict(QK_NORM=False, HIDDEN_NORM=False, ROTARY=False, GATES=0, SQUASH=0.01, SINKS=True)

def compile(kernel, fixed, dtype):
    pointers = POINTERS | dict.fromkeys("proj hidden relative k v y x".split(), dtype)
    names = kernel.arg_names
    given = {n: fixed[n] for n in names if n in fixed}
    types = {n: "*" + pointers[n] if n in pointers else "fp32" if n in FLOATS else "i32" for n in names}
    types |= dict.fromkeys(given, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers}
    source = ASTSource(fn=kernel, signature=types, constexprs={(names.index(n),): x for n, x in given.items()}, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, num_stages=2))
    assert made.asm["cubin"] and made.metadata.shared < 227 * 1024, made.metadata.shared

for kernel in (slots._step, slots._square_relu):
    compile(kernel, SIZES | MODERN, "bf16")
compile(slots._step, SIZES | PAPER | dict(STAGES=3), "fp32")
compile(slots._step, SIZES | HOSTED | dict(SKIP_DEAD=True), "bf16")
compile(compaction._compact, SIZES | dict(SCAN=compaction.SCAN, MOVE=compaction.MOVE), "bf16")
POINTERS["weight"] = "bf16"
for tiles in (products.FEW_ROWS, *products.MANY_ROWS[: int(sys.argv[1])]):
    blocks = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tiles))
    compile(products._linear, blocks | dict(NORM=True, SQUARE=True, ADD=False, SUMS=0, SUMS_PAD=1), "bf16")
    compile(products._linear, blocks | dict(NORM=False, SQUARE=False, ADD=True, SUMS=0, SUMS_PAD=1), "bf16")
    compile(products._linear, blocks | dict(NORM=True, SQUARE=False, ADD=False, SUMS=16, SUMS_PAD=16), "bf16")
print("compiled")
"""


@pytest.mark.parametrize("large_tiles", [1, pytest.param(3, marks=pytest.mark.long)])
def test_the_kernels_compile_for_compute_capability_9(large_tiles):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    out = subprocess.run([sys.executable, "-c", CODE, str(large_tiles)], capture_output=True, text=True, env=env)
    assert out.stdout.startswith("compiled"), out.stderr[-3000:]
