"""Conduct: a system prompt with three rules that can be checked, a long text after it, and a request at its end.

What eviction is known to lose are instructions that stand far back; nothing else of the text is asked for.
"""

from __future__ import annotations

import random

from .haystack import Haystack
from .needles import hide
from .prompts import Frame, Prompt
from .words import NOUNS

RULES = {
    "begin": "Begin every answer with the word {}.",
    "end": "End every answer with the word {}.",
    "capitals": "Write every answer in capital letters only.",
    "no comma": "Never use a comma in an answer.",
    "words": "Never use more than {} words in an answer.",
    "mention": "Mention the word {} in every answer.",
}
SLOTS = (("begin", "end"), ("capitals", "no comma", "words"), ("mention",))
"""One rule of each slot makes a system prompt: all three can be followed at once."""
REQUESTS = (
    "What does a baker do in the morning?",
    "Why do people keep gardens?",
    "How would you describe the sea to a child?",
    "What is a bridge good for?",
    "What makes a good friend?",
    "Why does it rain?",
    "What can one see in a library?",
    "How does one make tea?",
    "What do farmers do in autumn?",
    "Why do birds sing?",
)


def make_conduct(frame: Frame, haystack: Haystack, context: int, index: int, rng: random.Random) -> Prompt:
    words = rng.sample(NOUNS, 2)
    chosen = [rng.choice(slot) for slot in SLOTS]
    values = {"begin": words[0], "end": words[0], "words": str(rng.randrange(20, 41)), "mention": words[1]}
    told = " ".join(RULES[rule].format(values.get(rule, "").capitalize()) for rule in chosen)
    system = f"You are a helpful assistant. Follow three rules. {told}"
    text = hide(frame, "Here is a text.\n\n", [], haystack.take, context, rng, system)
    question = f"\n\nLeave the text aside now. {rng.choice(REQUESTS)} Answer in two sentences."
    wanted = tuple(f"{rule}:{values.get(rule, '')}" for rule in chosen)
    return Prompt("conduct", index, text, question, wanted, 64, system=system, rule="rules", fills=True)
