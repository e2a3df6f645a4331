"""Replay: a window that is read at once gives what its fragments give, with every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("gymnasium")

from expire_span.train import replay as module
from tests.tiny_agents import play_twice, tiny_agent

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("mixer", ["expire_span", "gru", "gru+expire_span"])
def test_a_window_at_once_equals_its_fragments(mixer):
    config = tiny_agent(window=16)
    learner = play_twice(replace(config, model=config.model.with_mixer(mixer)))
    window = learner.player.play(16, gamma=0.9, gae_lambda=0.8).window
    policy = learner.trained.double().train()
    window.state = [
        {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in part.items()} for part in window.state
    ]
    assert int(window.begins.sum()) > window.rows
    found = []
    for read in (module._read_whole, module._read_fragments):
        encoded = policy.encoder(window.observation).flatten(0, 1)
        out = read(policy, window, encoded)
        order = out.index.argsort()
        columns = [getattr(out, name)[order] for name in ("log_prob", "value", "entropy", "span")]
        policy.zero_grad()
        (columns[0] * torch.arange(len(order)) + columns[1].square() + columns[3]).sum().backward()
        found.append([*columns, *(p.grad.clone() for p in policy.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    for whole, parts in zip(*found):
        torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-9)
