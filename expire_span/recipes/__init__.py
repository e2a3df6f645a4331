"""Runs by name: each recipe is a function that returns a `RunConfig`. Standard library only.

TASK is the recommended run: on one GPU, unless the task is so small that two CPU cores do. TASK_tiny takes minutes on two CPU
cores. TASK_paper is the published setting, or the longest that the paper shows. A further word says what else differs.

A new experiment is a function that takes a recipe and changes fields: `replace(text(), seed=1)`. A recipe takes at most one
other, which takes none, so that its settings are read in two places at most.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from expire_span.models.systems.expire_span import HeadReach, PaperDetails
from expire_span.models.systems.recurrent import GRUConfig
from expire_span.recipes import agents, tasks
from expire_span.settings.run import (
    BudgetConfig,
    DecoderConfig,
    EntrancesTask,
    ExpireSpanConfig,
    RecallTask,
    RunConfig,
    TextTask,
    TrainConfig,
    WordsTask,
)
from expire_span.settings.tasks import BooksTask


def recall() -> RunConfig:
    """Remember a colour through a long corridor and forget the corridor: the demo, minutes on a CPU."""
    # With short corridors in the mix and many heads, the cue is found soon; blank episodes make every colour worth keeping.
    # Spans start so long that early updates cannot make the cue expire, and the span loss starts only once the task is solved:
    # a cue that has expired gets no gradient.
    task = RecallTask(min_length=5, max_length=400, blank_prob=0.2)
    mixer = ExpireSpanConfig(max_span=1024, ramp=3, initial_span=0.999, span_loss="l1")
    model = DecoderConfig.modern(dim=128, layers=1, heads=8, ff_dim=128, positions="none", mixer=mixer)
    budget = BudgetConfig(live=10, initial_weight=1e-3, gain=0.3, max_weight=1e-2, start_loss=0.15, patience_loss=0.15)
    train = TrainConfig(
        steps=300, batch=16, block=402, carry=False, lr=5e-3, span_lr_scale=0.5, warmup=10, budget=budget
    )
    train = replace(train, schedule="linear", decay_share=0.3, eval_every=100, eval_batches=4)
    return RunConfig(task, model, train)


def entrances() -> RunConfig:
    """Count how often a series has come into [0, 1], and keep little more than the entrances; a minute on a CPU."""
    # Rotary angles show the step before, which tells an entrance from staying inside.
    mixer = ExpireSpanConfig(max_span=64, ramp=3, initial_span=0.99, span_loss="l1")
    model = DecoderConfig.modern(dim=64, layers=2, heads=4, ff_dim=128, mixer=mixer)
    budget = BudgetConfig(live=4, initial_weight=1e-3, gain=0.3, max_weight=1e-1, start_loss=0.1, patience_loss=0.08)
    train = TrainConfig(steps=800, batch=64, block=21, carry=False, lr=5e-3, warmup=20, budget=budget)
    train = replace(train, schedule="linear", decay_share=0.5, eval_every=200, eval_batches=4)
    return RunConfig(EntrancesTask(), model, train)


def words() -> RunConfig:
    """Predict the words of a file (--task.path) or of built-in tales with two gated recurrent layers; minutes on a CPU."""
    model = DecoderConfig.modern(dim=64, layers=2, heads=4, ff_dim=128, mixer=GRUConfig())
    train = TrainConfig(steps=400, batch=32, block=40, lr=5e-3, warmup=20, eval_every=200)
    return RunConfig(WordsTask(), model, train)


def text() -> RunConfig:
    """Predict the bytes of any file or folder (--task.path): 6 layers of 256, for one GPU."""
    mixer = ExpireSpanConfig(max_span=4096, ramp=64, initial_span=0.1, temperature=4.0)
    model = DecoderConfig.modern(dim=256, layers=6, heads=4, ff_dim=1024, mixer=mixer)
    train = TrainConfig(steps=5000, batch=32, block=512, lr=1e-3, warmup=200, weight_decay=0.01)
    return RunConfig(TextTask(), model, train)


def text_tiny() -> RunConfig:
    """Predict the bytes of any file or folder (--task.path): 2 layers of 128, minutes on a CPU."""
    mixer = ExpireSpanConfig(max_span=1024, ramp=32, initial_span=0.1, temperature=4.0)
    model = DecoderConfig.modern(dim=128, layers=2, heads=2, ff_dim=256, mixer=mixer)
    train = TrainConfig(steps=1000, batch=16, block=128, lr=2e-3, warmup=50, weight_decay=0.01)
    return RunConfig(TextTask(), model, train)


def enwik8() -> RunConfig:
    """enwik8 (--task.path): 12 layers of 512 (38M weights), parallel training on windows of 8192; minutes on one H200."""
    # Few heads of a layer need long memory, so each learns its average span, starting from 98 steps. Two heads distribute it
    # over tokens; the others may shrink to lifetimes of 8 steps, the ramp included. At a lower temperature, noise alone would
    # make spans differ.
    mixer = ExpireSpanConfig(max_span=8192, ramp=48, initial_span=0.012, span_loss="l1", temperature=32.0)
    reach = HeadReach(learned=True, own_heads=2, shortest_shared=-40.0, stop_gradient=True)
    mixer = replace(mixer, span_per="kv_head", reach=reach)
    model = DecoderConfig.modern(dim=512, layers=12, heads=8, ff_dim=2048, dropout=0.05, mixer=mixer)
    train = TrainConfig(steps=6212, batch=8, block=8192, carry=False, optimizer="muon", lr=3e-3, muon_lr=2e-2)
    train = replace(train, betas=(0.9, 0.95), weight_decay=0.05, span_weight=2e-6)
    train = replace(train, warmup=200, schedule="linear", decay_share=0.6, final_lr=0.0)
    train = replace(train, precision="bf16", compile=True, eval_every=500, checkpoint_every=2000, log_every=50)
    return RunConfig(TextTask(path="data/enwik8"), model, train)


def enwik8_long() -> RunConfig:
    """enwik8 (--task.path): the recipe enwik8 for 25 minutes on one H200, at lower rates that fall from the start."""
    # The data are read 16 times, hence dropout and weight decay. Constant high rates over most of a long run teach little.
    # Gates let heads be silent that have nothing to say. Other windows in each pass, in random order, are memorised less.
    base = enwik8()
    train = replace(base.train, steps=22_300, lr=1.25e-3, muon_lr=7.5e-3, decay_share=0.95, span_weight=6e-7)
    train = replace(train, weight_decay=0.15, eval_every=3000, checkpoint_every=8000)
    task = replace(base.task, shuffle=True)
    return replace(base, task=task, model=replace(base.model, dropout=0.1, head_gates=True), train=train)


def shipped() -> RunConfig:
    """The model that ships with the package (--task.path: Wikipedia and books): 3.9M weights; minutes on one H200."""
    # One span per layer, so that the page has one number to show for each token. Spans start long and are shortened slowly,
    # since a memory that has expired gets no gradient. The feed-forward part is as wide as 8 MB at two bytes per weight
    # allow.
    mixer = ExpireSpanConfig(max_span=2048, ramp=48, initial_span=0.2, span_loss="l1", temperature=8.0)
    model = DecoderConfig.modern(dim=256, layers=6, heads=4, ff_dim=704, mixer=mixer)
    train = replace(enwik8().train, steps=12_000, batch=32, block=2048, weight_decay=0.02, span_weight=1e-6)
    task = TextTask(path="data/shipped", valid_share=0.02, test_share=0.02)
    return RunConfig(task, model, train)


def enwik8_paper_8l() -> RunConfig:
    """The paper's small enwik8 model (8 layers of 256, spans up to 4096), trained in blocks of 256."""
    return _enwik8(
        DecoderConfig.paper(dim=256, layers=8, heads=4, ff_dim=1024, relative_window=256, dropout=0.0),
        ExpireSpanConfig(
            max_span=4096, ramp=64, initial_span=0.1, temperature=64.0, paper=PaperDetails(initial_memories=256)
        ),
        TrainConfig(steps=100_000, batch=64, block=256, lr=3e-4, warmup=8000, clip=0.3),
    )


def enwik8_paper() -> RunConfig:
    """The paper's 12-layer enwik8 model (38M weights, spans up to 16384), trained in blocks of 512."""
    return _enwik8(
        DecoderConfig.paper(dim=512, layers=12, heads=8, ff_dim=2048, relative_window=512, dropout=0.3),
        ExpireSpanConfig(
            max_span=16_384, ramp=128, initial_span=0.1, paper=PaperDetails(noisy=True, initial_memories=512)
        ),
        TrainConfig(steps=100_000, batch=512, block=512, lr=7e-4, warmup=8000, clip=0.3),
    )


def _enwik8(model: DecoderConfig, mixer: ExpireSpanConfig, train: TrainConfig) -> RunConfig:
    """What the paper's two enwik8 models share: raw bytes split 90/5/5, block training, Adam at a constant rate."""
    mixer = replace(mixer, paper=replace(mixer.paper, include_self=False, normalizer_eps=1e-8))
    train = replace(train, carry=True, schedule="constant", span_weight=1e-6, betas=(0.9, 0.999), eval_every=1000)
    train = replace(train, checkpoint_every=1000, log_every=50, compile=True)
    return RunConfig(TextTask(path="data/enwik8"), replace(model, mixer=mixer), train)


def books_tiny() -> RunConfig:
    """Predict the characters of whole books (--task.path): 2 layers of 128, minutes on a CPU."""
    base = text_tiny()
    return replace(base, task=BooksTask(), train=replace(base.train, eval_batches=4, test_batches=64))


def books() -> RunConfig:
    """Predict the characters of whole books (--task.path): the enwik8 recipe's 12 layers of 512 in windows of 8192."""
    return replace(enwik8(), task=BooksTask())


def books_paper() -> RunConfig:
    """Predict the characters of whole books (--task.path): the paper's 12 layers, trained in blocks of 512."""
    return replace(enwik8_paper(), task=BooksTask())


GROUPS: dict[str, tuple[Callable[[], RunConfig], ...]] = {
    "see what forgetting does": (recall, entrances, words),
    "model text": (
        text_tiny,
        text,
        enwik8,
        enwik8_long,
        enwik8_paper,
        enwik8_paper_8l,
        books_tiny,
        books,
        books_paper,
        shipped,
    ),
    "remember through long sequences": (
        *(
            tasks.copy_tiny,
            tasks.copy,
            tasks.copy_paper,
            tasks.corridor_tiny,
            tasks.corridor,
            tasks.portal_tiny,
            tasks.portal,
        ),
        *(tasks.instruction_tiny, tasks.instruction, tasks.instruction_paper),
    ),
    "repeat the paper's game of collisions": (
        *(tasks.collision_tiny, tasks.collision, tasks.collision_mixed, tasks.collision_lessons, tasks.collision_paper),
    ),
    "teach an agent": (
        *(agents.agent, agents.agent_corridor_tiny, agents.agent_corridor, agents.agent_corridor_window),
        *(
            agents.agent_corridor_hard,
            agents.agent_portal_tiny,
            agents.agent_portal,
            agents.agent_tmaze_tiny,
            agents.agent_tmaze,
        ),
        *(agents.agent_repeat_first_tiny, agents.agent_repeat_first),
        *(agents.agent_repeat_previous_tiny, agents.agent_repeat_previous),
    ),
}
"""The recipes by what they are for; each function is the recipe of its name."""
RECIPES = {recipe.__name__: recipe for group in GROUPS.values() for recipe in group}
LESSONS: dict[str, tuple[Callable[[], RunConfig], ...]] = {
    "copy_tiny": (tasks.copy_lesson,),
    "copy": (tasks.copy_lesson,),
    "collision": (tasks.collision_mixed,),
    "collision_lessons": (tasks.collision_dense, tasks.collision_sparse),
    "agent_corridor_hard": (agents.agent_corridor_lesson,),
}
"""What is trained before a recipe with several stages, in turn; each stage starts from the weights of the one before."""


def names_by_purpose() -> dict[str, list[str]]:
    """The names of all recipes by what they are for; those that a user has added come last."""
    groups = {purpose: [recipe.__name__ for recipe in recipes] for purpose, recipes in GROUPS.items()}
    own = [name for name in RECIPES if not any(name in names for names in groups.values())]
    return groups | ({"train what you have added": own} if own else {})


def stages_of(name: str) -> list[Callable[[], RunConfig]]:
    """The stages of a recipe: its lessons, if it has any, and then the recipe itself."""
    return [*LESSONS.get(name, ()), get_recipe(name)]


def summary(recipe: Callable[[], RunConfig]) -> str:
    """One line about a recipe: the first of its docstring."""
    return (recipe.__doc__ or "").strip().splitlines()[0]


def get_recipe(name: str) -> Callable[[], RunConfig]:
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=1)
    near = near or [other for other in RECIPES if other.split("_")[0] == name.split("_")[0]]
    advice = f"did you mean {' or '.join(near)}?" if near else f"known are: {', '.join(RECIPES)}"
    raise ValueError(f"unknown recipe {name!r}; {advice}")
