"""A check, for any retrofitted model, that deleting expired memories changes no output."""

from __future__ import annotations

import torch

from expire_span.store.device_memory import check_fits

from .retrofitted import Retrofit


@torch.no_grad()
def streamed_error(retrofitted: Retrofit, count: int, seed: int = 0) -> tuple[float, float]:
    """Largest difference between logits with and without deletion, relative to the largest logit, and the share of memories
    that is left at the end."""
    if count < 2:
        raise ValueError(f"a stream to verify needs at least 2 tokens, got {count}; give more")
    model = retrofitted.model
    device = next(model.parameters()).device
    check_fits(4 * count * model.config.vocab_size, f"the logits of {count:,} tokens", f"tokens {count:,}", device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (1, count), generator=generator)
    begins = torch.tensor(retrofitted.beginning.context if retrofitted.beginning else (), dtype=torch.long)[:count]
    ids = torch.cat([begins, ids[0, len(begins) :]]).unsqueeze(0).to(device)
    undeleted = model(ids, use_cache=False).logits
    cache = retrofitted.new_cache()
    parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(max(count // 8, 1), 1)]
    error = (torch.cat(parts, 1) - undeleted).abs().max() / undeleted.abs().max()
    kept = torch.cat([live.flatten().float() for live in cache.live()]).mean() / count
    return float(error), float(kept)
