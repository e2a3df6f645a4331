"""Teach a frozen model what to forget with transformers' Trainer instead of `expire-span retrofit`.

python examples/08_trainer.py MODEL TEXT_FILE OUTPUT_FOLDER [steps] [context]
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from expire_span.hf import RetrofitConfig, retrofit

SPAN_WEIGHT = 1e-3
"""Price of a memory's life, per step and unit of KL divergence; `expire-span retrofit` finds it from a budget instead."""


class ForgettingTrainer(Trainer):
    """The student forgets, the teacher is the same model with its retrofit paused; only the span predictors learn."""

    retrofitted: Any = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        ids = inputs["input_ids"]
        with torch.no_grad(), self.retrofitted.paused():
            teacher = model(ids, use_cache=False).logits
        cache = self.retrofitted.new_cache(learning=True)
        student = model(ids, past_key_values=cache)
        divergence = F.kl_div(
            student.logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none"
        )
        spans = torch.stack([layer.last.span.clamp_min(0).mean() for layer in cache.layers if hasattr(layer, "last")])
        loss = divergence.sum(-1).mean() + SPAN_WEIGHT * spans.mean()
        return (loss, student) if return_outputs else loss


def contexts(text: str, tokenizer: Any, length: int) -> list[dict[str, torch.Tensor]]:
    """The text in pieces of equal length, without the rest at its end."""
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    return [{"input_ids": piece} for piece in ids.split(length) if len(piece) == length]


if __name__ == "__main__":
    name, text, folder = sys.argv[1:4]
    steps, length = (int(x) for x in [*sys.argv[4:], *("200", "512")[len(sys.argv[4:]) :]])
    model = AutoModelForCausalLM.from_pretrained(name).requires_grad_(False)
    retrofitted = retrofit(model, RetrofitConfig(max_span=2 * length, ramp=min(64, length // 4), keep_first=4))
    settings = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=1, save_strategy="no", report_to=[], logging_steps=10
    )
    data: Any = contexts(Path(text).read_text(encoding="utf-8"), AutoTokenizer.from_pretrained(name), length)
    optimizer = torch.optim.AdamW(retrofitted.parameters(), lr=1e-3, weight_decay=0.0)
    trainer = ForgettingTrainer(model, settings, train_dataset=data, optimizers=(optimizer, None))
    trainer.retrofitted = retrofitted
    trainer.train()
    retrofitted.save(Path(folder) / "adapter")
    print(f"adapter in {Path(folder) / 'adapter'}; check it with: expire-span verify {Path(folder) / 'adapter'}")
