"""Score a retrofitted model with lm-evaluation-harness (pip install lm-eval), exactly as it is served: with deletion.

python examples/07_lm_eval.py MODEL ADAPTER [tasks, separated by commas]
"""

import sys
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from expire_span.hf import Retrofit, load_adapter


class ExpiringLM(HFLM):
    """A retrofitted model for the harness: likelihoods need no cache, and every generation gets one that forgets."""

    def __init__(self, retrofitted: Retrofit, **options: Any) -> None:
        super().__init__(pretrained=retrofitted.model, **options)
        self.retrofitted = retrofitted

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **options: Any) -> Any:
        return super()._model_generate(
            context, max_length, stop, past_key_values=self.retrofitted.new_cache(), **options
        )


if __name__ == "__main__":
    model, adapter, tasks = sys.argv[1], sys.argv[2], (sys.argv[3:] or ["lambada_openai"])[0]
    retrofitted = load_adapter(AutoModelForCausalLM.from_pretrained(model).eval(), adapter)
    scored = ExpiringLM(retrofitted, tokenizer=AutoTokenizer.from_pretrained(model), batch_size=1)
    results = lm_eval.simple_evaluate(scored, tasks=tasks.split(","))
    for task, scores in (results or {"results": {}})["results"].items():
        print(task, {name: value for name, value in scores.items() if isinstance(value, float)})
