"""Recipes of the sequence tasks and of the supervised twins. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from expire_span.models.systems.expire_span import PaperDetails
from expire_span.settings.run import BudgetConfig, DecoderConfig, ExpireSpanConfig, RunConfig, TrainConfig
from expire_span.settings.tasks import CollisionTask, CopyTask, CorridorTask, InstructionTask, PortalTask


def copy_lesson() -> RunConfig:
    """Count a few tokens among up to 64."""
    # Without positions, the count does not depend on how far back the A tokens are; unnormalised keys can outweigh thousands of
    # fillers. Counting is learned as the rate falls. Spans begin so long that those of the A tokens, which fall half as fast as
    # the fillers', are still long enough when the fillers' are short. Heads have 32 dimensions, as the GPU's kernels need.
    mixer = ExpireSpanConfig(max_span=32_768, ramp=16, initial_span=0.999, span_loss="l1", temperature=2.0)
    model = DecoderConfig.modern(dim=64, layers=1, heads=2, ff_dim=128, positions="none", qk_norm=False, mixer=mixer)
    train = TrainConfig(steps=700, batch=64, block=64, carry=False, lr=4e-3, warmup=10, schedule="linear")
    train = replace(train, decay_share=1.0, final_lr=0.05, span_weight=0.0, eval_every=300, eval_batches=1)
    return RunConfig(CopyTask(min_length=16, max_length=64), model, replace(train, test_batches=16))


def _carry_count(train: TrainConfig, *, batch: int, block: int) -> TrainConfig:
    # The task loss does not hold up the spans of A tokens: they fade together with the start token that they are compared with,
    # and normalised weights stay the same to the end of the ramp. So the budget rests as soon as it is met.
    budget = BudgetConfig(live=100, initial_weight=1e-4, max_weight=1e-3, start_loss=0.02, patience_loss=0.1, rest=True)
    train = replace(train, steps=500, batch=batch, block=block, lr=1e-3, span_lr_scale=16.0, final_lr=0.1)
    return replace(train, budget=budget, span_weight=1e-6, eval_every=50)


def copy_tiny() -> RunConfig:
    """Carry a count through 2,048 steps of filler and forget the filler; after a lesson of up to 64 steps."""
    base = copy_lesson()
    return replace(base, task=CopyTask(min_length=16), train=_carry_count(base.train, batch=32, block=2048))


def copy() -> RunConfig:
    """Carry a count through 16,384 steps of filler and forget the filler; after a lesson of up to 64 steps."""
    # Lengths differ from batch to batch, so that few recorded graphs would be used a second time.
    base, length = copy_lesson(), 16_384
    model = replace(base.model, mixer=replace(base.model.mixer, max_span=4 * length))
    train = replace(_carry_count(base.train, batch=16, block=length), precision="bf16", graphs=False, test_batches=8)
    return replace(base, task=CopyTask(min_length=16, max_length=length), model=model, train=train)


def copy_paper() -> RunConfig:
    """Count a few tokens, then carry the count through 131,072 steps of filler."""
    # Lengths of all octaves are trained from the start: spans shrink to what the lengths in training need. One optimizer step
    # must move spans by less than the ramp: hence the temperature. Heads have 32 dimensions, as the GPU's kernels need.
    length = 131_072
    mixer = ExpireSpanConfig(max_span=2 * length, ramp=64, initial_span=0.95, span_loss="l1", temperature=64.0)
    model = DecoderConfig.modern(dim=64, layers=2, heads=2, ff_dim=128, positions="none", qk_norm=False, mixer=mixer)
    budget = BudgetConfig(live=48, initial_weight=1e-5, gain=0.05, max_weight=1e-3, start_loss=0.05, patience_loss=0.08)
    train = TrainConfig(steps=3000, batch=16, block=length, carry=False, lr=2e-3, span_lr_scale=0.5, warmup=10)
    train = replace(train, budget=replace(budget, wait=300), schedule="linear", decay_share=0.4, precision="bf16")
    train = replace(train, graphs=False, eval_every=500, eval_batches=1)
    return RunConfig(CopyTask(min_length=16, max_length=length), model, train)


def corridor_tiny() -> RunConfig:
    """Walk an expert's corridors of up to 60 cells and open the door of the cue's colour."""
    mixer = ExpireSpanConfig(max_span=512, ramp=8, initial_span=0.99, span_loss="l1")
    return RunConfig(CorridorTask(), _twin_model(mixer, layers=1), _twin_train(block=120, live=12, steps=400))


def corridor() -> RunConfig:
    """Walk an expert's corridors of up to 200 cells with four shuffled doors."""
    task = CorridorTask(max_length=200, colours=4, niche_prob=0.5, shuffled=True)
    mixer = ExpireSpanConfig(max_span=1024, ramp=8, initial_span=0.99, span_loss="l1")
    model = replace(_twin_model(mixer, layers=2), heads=2)
    return RunConfig(task, model, _on_gpu(_twin_train(block=400, live=20, steps=2000), 128))


def portal_tiny() -> RunConfig:
    """Remember which of two doors was right in each of 8 rooms (an expert's episodes)."""
    mixer = ExpireSpanConfig(max_span=1024, ramp=8, initial_span=0.99, span_loss="l1")
    return RunConfig(PortalTask(), _twin_model(mixer, layers=2), _twin_train(block=132, live=30, steps=300))


def portal() -> RunConfig:
    """Remember the right doors of 12 wide rooms without markers (an expert's episodes)."""
    task = PortalTask(rooms=12, width=7, marked=False, max_steps=900, view=7)
    mixer = ExpireSpanConfig(max_span=2048, ramp=16, initial_span=0.99, span_loss="l1")
    model = replace(_twin_model(mixer, layers=4), dim=128, ff_dim=256)
    return RunConfig(task, model, _on_gpu(_twin_train(block=900, live=120, steps=3000), 64))


def instruction_tiny() -> RunConfig:
    """Pick one instruction out of 50 steps of talk and carry it out at the right place."""
    # Most sentences are distraction: episodes with little talk teach what an instruction is, long ones to remember it.
    task = InstructionTask(instructions=1, talk=50, least_talk=4)
    mixer = ExpireSpanConfig(max_span=1024, ramp=16, initial_span=0.99, span_loss="l1")
    train = replace(_twin_train(block=456, live=60, steps=1200), batch=64, warmup=30, eval_every=300)
    train = replace(train, budget=replace(train.budget, wait=600))
    return RunConfig(task, replace(_twin_model(mixer, layers=3), qk_norm=False), train)


def instruction() -> RunConfig:
    """Three instructions, some of them cancelled or replaced, in 200 steps of talk."""
    # With AdamW, 6,000 steps of this batch reached 64%.
    base = _harder_instruction(3, 200, batch=64)
    return replace(base, train=replace(base.train, optimizer="muon", muon_lr=1e-2))


def instruction_paper() -> RunConfig:
    """Six instructions, some of them cancelled or replaced, in 1,000 steps of talk."""
    return _harder_instruction(6, 1000, batch=32)


def _harder_instruction(count: int, talk: int, *, batch: int) -> RunConfig:
    base = instruction_tiny()
    task = replace(base.task, instructions=count, talk=talk, least_talk=2 * count)
    mixer = replace(base.model.mixer, max_span=32 * talk)
    model = replace(base.model, dim=128, layers=4, ff_dim=256, mixer=mixer)
    block = 8 * (talk + 6 * count + 1)
    train = _on_gpu(_twin_train(block=block, live=8 * count + 60, steps=6000), batch)
    budget = replace(train.budget, wait=3000)
    return replace(base, task=task, model=model, train=replace(train, lr=2e-3, eval_every=1000, budget=budget))


def _twin_model(mixer: ExpireSpanConfig, *, layers: int) -> DecoderConfig:
    return DecoderConfig.modern(dim=64, layers=layers, heads=4, ff_dim=128, mixer=mixer)


def _twin_train(*, block: int, live: float, steps: int) -> TrainConfig:
    """Settings that the supervised twins share: whole episodes, and a span loss that starts once the task is solved."""
    budget = BudgetConfig(live=live, initial_weight=1e-4, gain=0.1, max_weight=1e-2, start_loss=0.1, patience_loss=0.1)
    train = TrainConfig(steps=steps, batch=32, block=block, carry=False, lr=3e-3, span_lr_scale=0.5, warmup=20)
    return replace(train, budget=budget, schedule="linear", decay_share=0.3, eval_every=100, eval_batches=4)


def _on_gpu(train: TrainConfig, batch: int) -> TrainConfig:
    """Episodes differ in width from batch to batch, so nothing is compiled or recorded for a width."""
    return replace(train, batch=batch, precision="bf16", graphs=False, warmup=100, eval_every=500)


def collision_tiny() -> RunConfig:
    """Where did two colours last collide? An easy variant: 2 colours, 4 x 4 cells, windows of 32 frames, with aids."""
    # Collisions are made frequent in half of the training rows; without, the model stayed at chance (73% error), and with a
    # collision in every third frame of all rows it ended at 61%.
    task = CollisionTask(size=4, colours=2, eval_frames=20_000, hints=True, meet_probs=(0.3, 0.05, 0.0, 0.0))
    mixer = ExpireSpanConfig(max_span=512, ramp=32, initial_span=0.9, span_loss="l1", temperature=4.0)
    model = DecoderConfig.modern(dim=64, layers=3, heads=4, ff_dim=128, qk_norm=False, mixer=mixer)
    train = TrainConfig(steps=600, batch=16, block=256, carry=False, lr=3e-3, warmup=30, span_weight=1e-5)
    return RunConfig(task, model, replace(train, eval_every=200, eval_batches=4, eval_batch=16))


def collision_dense() -> RunConfig:
    """Every third frame collides, windows of 1,024 tokens."""
    base = collision_lessons()
    train = replace(base.train, steps=600, batch=64, block=1024, warmup=200, span_weight=0.0, budget=BudgetConfig())
    train = replace(train, eval_every=600, eval_batches=4, test_batches=4)
    return replace(base, task=CollisionTask(path="data/collision-dense", meet_prob=0.3, hints=True), train=train)


def collision_sparse() -> RunConfig:
    """Every twentieth frame collides, windows of 4,096 tokens."""
    base = collision_lessons()
    train = replace(base.train, steps=2000, batch=16, block=4096, warmup=200, span_weight=0.0, budget=BudgetConfig())
    train = replace(train, eval_every=2000, eval_batches=4, test_batches=4)
    return replace(base, task=CollisionTask(path="data/collision-sparse", meet_prob=0.05, hints=True), train=train)


def collision_lessons() -> RunConfig:
    """Where did two colours last collide? The paper's game, spans up to 16,384; after two lessons with frequent collisions."""
    # Spans start long, since a collision that has expired gives no gradient; keys are not normalised, since a collision must
    # outweigh thousands of other frames. The span loss starts once the task is learned, and weakens whenever the loss rises.
    mixer = ExpireSpanConfig(max_span=16_384, ramp=128, initial_span=0.9, span_loss="l1", temperature=16.0)
    model = DecoderConfig.modern(dim=256, layers=4, heads=4, ff_dim=1024, qk_norm=False, mixer=mixer)
    budget = BudgetConfig(
        live=1500, initial_weight=1e-8, gain=0.01, max_weight=1e-6, start_loss=1.0, patience_loss=1.08
    )
    train = TrainConfig(steps=10_000, batch=4, block=16_384, carry=False, optimizer="muon", lr=2e-3, muon_lr=1e-2)
    train = replace(train, betas=(0.9, 0.95), budget=budget, warmup=300, schedule="linear", decay_share=0.5)
    train = replace(train, final_lr=0.0, precision="bf16", compile=True, log_every=100, checkpoint_every=1000)
    train = replace(train, eval_every=1000, eval_batch=64, eval_block=2048, eval_batches=8, test_batches=40)
    return RunConfig(CollisionTask(path="data/collision"), model, train)


def collision_mixed() -> RunConfig:
    """Where did two colours last collide? The paper's game beside rows with frequent collisions, spans up to 16,384."""
    # Half of the rows are the game itself. The others keep the question in view, so that no lessons are needed.
    base = collision_lessons()
    task = CollisionTask(path="data/collision-mixed", meet_probs=(0.3, 0.05, 0.0, 0.0), hints=True)
    return replace(base, task=task, train=replace(base.train, steps=1300))


def collision() -> RunConfig:
    """Where did two colours last collide? Spans up to 65,536; after collision_mixed, whose spans it makes longer."""
    # Spans are shares of max_span, so that what has learned to live 16k steps lives 64k. Rotary angles turn more slowly: with
    # the usual base the longest wavelength is 47k tokens, and a colour of 20k steps ago does not look like itself. No span
    # loss: it would shorten spans whose memories are not used yet. Three of four rows are the game.
    base = collision_lessons()
    task = CollisionTask(path="data/collision-long", meet_probs=(0.05, 0.0, 0.0, 0.0), hints=True)
    train = replace(base.train, steps=4000, block=65_536, lr=1e-3, muon_lr=5e-3, warmup=100, decay_share=0.95)
    train = replace(train, span_weight=0.0, budget=BudgetConfig(), eval_batch=16, test_batches=160)
    mixer = replace(base.model.mixer, max_span=65_536)
    return replace(base, task=task, model=replace(base.model, mixer=mixer, rotary_base=1e6), train=train)


def collision_paper() -> RunConfig:
    """Where did two colours last collide? The paper's model: 6 layers of 512, blocks of 256, 100,000 updates of batch 512."""
    details = PaperDetails(include_self=False, normalizer_eps=1e-8, initial_memories=256)
    mixer = ExpireSpanConfig(max_span=16_384, ramp=128, initial_span=0.01, paper=details)
    model = DecoderConfig.paper(dim=512, layers=6, heads=4, ff_dim=1024, relative_window=256, dropout=0.1, norm="pre")
    train = TrainConfig(steps=100_000, batch=512, block=256, lr=1e-4, clip=0.1, span_weight=2e-6, betas=(0.9, 0.999))
    train = replace(train, schedule="constant", compile=True, eval_every=1000, checkpoint_every=1000, log_every=50)
    return RunConfig(CollisionTask(path="data/collision"), replace(model, mixer=mixer), train)
