"""stories260K, a small trained model, with an adapter that is trained here on stories that it has written.

EXPIRE_SPAN_STORIES names its folder, in the form of Hugging Face's library (config.json, model.safetensors); the hub has it as
karpathy/tinyllamas in another form.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.vllm.engines import Case, make_case

VARIABLE = "EXPIRE_SPAN_STORIES"
LENGTHS = (7, 90, 260)
"""Tokens of the prompts, which begin stories that are not learned from."""


def stories_folder() -> Path | None:
    """The folder of the model, if the variable names one."""
    named = os.environ.get(VARIABLE)
    folder = Path(named) if named else None
    if folder is not None and not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{VARIABLE} must name a folder with config.json and model.safetensors, got {folder}")
    return folder


def stories_case(source: Path, folder: Path) -> Case:
    from transformers import AutoModelForCausalLM

    from expire_span.hf import RetrofitConfig, load_adapter, retrofit
    from expire_span.settings.retrofit import DistillConfig
    from expire_span.train.distill import distill

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    torch.manual_seed(0)
    begin = torch.full((12, 1), model.config.bos_token_id)
    stories = model.generate(begin, do_sample=True, max_new_tokens=500, min_new_tokens=500)
    retrofitted = retrofit(model, RetrofitConfig(max_span=256, ramp=16, keep_first=1))
    sizes = dict(context=256, block=128, batch=2, calibrate=4, eval_every=1000, eval_contexts=1)
    settings = DistillConfig(budget=0.25, steps=40, device="cpu", tracker="none", **sizes)
    run = distill(retrofitted, list(stories[:-3]), settings, folder / "run")
    retrofitted.detach()
    retrofitted = load_adapter(
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval(), run.path / "adapter"
    )
    return make_case(folder, retrofitted, [x[:n].tolist() for x, n in zip(stories[-3:], LENGTHS)])
