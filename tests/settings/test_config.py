"""Configs: JSON and back, refusals with both values, recipes that build."""

from __future__ import annotations

import json
import sys

import pytest

from expire_span.models.systems.expire_span import HeadReach
from expire_span.recipes import RECIPES, get_recipe, stages_of, summary
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
    from_dict,
    to_dict,
)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json(name):
    config = RECIPES[name]()
    assert from_dict(type(config), json.loads(json.dumps(to_dict(config)))) == config
    assert summary(RECIPES[name]).endswith(".")


def test_unknown_field_names_the_nearest():
    data = to_dict(RECIPES["recall"]())
    data["model"]["heds"] = 3
    with pytest.raises(ValueError, match="no field heds; did you mean heads"):
        from_dict(RunConfig, data)
    data = to_dict(RECIPES["recall"]())
    data["task"]["kind"] = "chess"
    with pytest.raises(
        ValueError,
        match=r"unknown kind 'chess' of .*known are: .*recall.*; one of your own is known once EXPIRE_SPAN_PLUGINS",
    ):
        from_dict(RunConfig, data)


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match="unknown recipe 'recal'; did you mean recall"):
        get_recipe("recal")
    with pytest.raises(ValueError, match="unknown recipe 'text_small'; did you mean text_tiny or text"):
        get_recipe("text_small")


def test_recipes_take_at_most_one_other_which_takes_none():
    """Counted while each is built, so that helpers between two recipes are seen through."""
    stages = {recipe.__code__: name for name in RECIPES for recipe in stages_of(name)}

    def count_depth(recipe):
        depth, deepest, taken = 0, 0, 0

        def watch(frame, event, _):
            nonlocal depth, deepest, taken
            if frame.f_code in stages and event in ("call", "return"):
                depth += 1 if event == "call" else -1
                taken += event == "call"
                deepest = max(deepest, depth)

        sys.setprofile(watch)
        try:
            recipe()
        finally:
            sys.setprofile(None)
        return deepest, taken

    assert all(count_depth(recipe) in ((1, 1), (2, 2)) for name in RECIPES for recipe in stages_of(name))
    assert all(name.removesuffix(end) in RECIPES for name in RECIPES for end in ("_tiny", "_paper")), "sizes of a task"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: DecoderConfig(heads=3, dim=64), "heads 3 and dim 64"),
        (lambda: DecoderConfig(heads=4, kv_heads=3), "kv_heads 3 and heads 4"),
        (lambda: DecoderConfig(dim=12, heads=4), "even head dim, got 3"),
        (lambda: ExpireSpanConfig(ramp=0), "ramp must be greater than 0, got 0"),
        (lambda: ExpireSpanConfig(initial_span=1.0), "got 1.0"),
        (
            lambda: ExpireSpanConfig(reach=HeadReach(spread=4.0)),
            "reach.spread .* needs span_per kv_head, got span_per layer",
        ),
        (
            lambda: ExpireSpanConfig(reach=HeadReach(True)),
            "reach.learned .* needs span_per kv_head, got span_per layer",
        ),
        (
            lambda: ExpireSpanConfig(reach=HeadReach(own_heads=2)),
            "reach.own_heads .* needs span_per kv_head, got span_per layer",
        ),
        (lambda: HeadReach(own_heads=0), "own_heads must be at least 1, got 0"),
        (lambda: HeadReach(spread=0.5), "at least 1, got 0.5"),
        (lambda: ExpireSpanConfig(span_per="kv_head", reach=HeadReach(spread=100.0)), r"must lie below 1, got 1$"),
        (
            lambda: ExpireSpanConfig(min_span=2000),
            "min_span must lie between -ramp and max_span, -32 and 1024, got 2000",
        ),
        (lambda: ExpireSpanConfig(min_span=-32), "min_span must lie between -ramp and max_span, -32 and 1024, got -32"),
        (
            lambda: HeadReach(shortest_shared=-3),
            "needs learned and own_heads, got learned False and own_heads None",
        ),
        (lambda: ExpireSpanConfig(cap=0), "cap must be at least 1, got 0"),
        (lambda: TrainConfig(batch=6, accumulate=4), "accumulate 4 and batch 6"),
        (lambda: TrainConfig(keep_checkpoints=1), "at least 2, got 1"),
        (lambda: TrainConfig(lr=0), "lr must be greater than 0, got 0"),
        (lambda: BudgetConfig(live=3, bytes=4), "3 and 4"),
        (lambda: RecallTask(min_length=9, max_length=3), "3 and 9"),
        (lambda: TextTask(valid_share=0.7), "got 0.7"),
        (lambda: EntrancesTask(min_length=9, max_length=3), "3 and 9"),
        (lambda: EntrancesTask(margin=0.5), "got 0.5"),
        (lambda: WordsTask(words=0), "words must be at least 1, got 0"),
    ],
)
def test_bad_values_are_named(build, words):
    with pytest.raises(ValueError, match=words):
        build()
