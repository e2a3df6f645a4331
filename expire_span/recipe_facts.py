"""What to expect of each recipe: size, the hardware it is meant for, how long it takes, the score. Standard library only.

Scores were measured with the recipe as it is, or are "not run"; docs/results.md has the whole record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CPU, GPU = "2 CPU cores", "one H200"
NOT_RUN = "not run"


@dataclass(frozen=True)
class RecipeFacts:
    """Expectations of one recipe."""

    size: Literal["tiny", "small", "paper"]
    """tiny: minutes on two CPU cores; small: about ten minutes on one GPU; paper: the published setting."""
    hardware: str
    """Hardware for which it is meant."""
    time: str
    """Time that it takes on that hardware."""
    score: str
    """Score that it reached, or "not run"."""


FACTS: dict[str, RecipeFacts] = {
    "recall": RecipeFacts("tiny", CPU, "1 min", "100% correct, 4.8 alive"),
    "entrances": RecipeFacts("tiny", CPU, "1 min", "99.9% correct, 4.5 / 6.4 alive"),
    "words": RecipeFacts("tiny", CPU, "1 min", "perplexity 1.74 on the built-in tales (test)"),
    "text": RecipeFacts("small", GPU, "10 min", NOT_RUN),
    "text_small": RecipeFacts("tiny", CPU, "15 min", "depends on the file"),
    "enwik8": RecipeFacts("small", GPU, "7 min", "1.052 bits a byte (test)"),
    "enwik8_long": RecipeFacts("small", GPU, "25 min", "1.0096 bits a byte (test), with --train.seconds 1485"),
    "shipped": RecipeFacts("small", GPU, "6 min", "1.355 bits a byte (test), with --train.seconds 350"),
    "enwik8_small": RecipeFacts("paper", GPU, "2 h", NOT_RUN),
    "enwik8_12l": RecipeFacts("paper", "8 GPUs", "days", NOT_RUN),
    "copy_lesson": RecipeFacts("tiny", CPU, "1 min", "100% of 512 episodes; copy and copy_small start from it"),
    "copy": RecipeFacts("tiny", CPU, "9 min", "100% of 512 episodes with 453 of 1,024 alive, after the lesson"),
    "copy_small": RecipeFacts(
        "small", GPU, "1 min", "100% of 128 episodes with 3,137 of 8,192 alive, after the lesson"
    ),
    "copy_paper": RecipeFacts("paper", GPU, "6 min", "100% at 131,072 tokens, nothing expired"),
    "corridor": RecipeFacts("tiny", CPU, "2 min", "100%, 8.9 alive"),
    "corridor_small": RecipeFacts(
        "small", CPU, "15 min", "100%, 10.4 / 9.0 alive, after 561 of its 2,000 steps, batches of 64"
    ),
    "portal": RecipeFacts("tiny", CPU, "2 min", "100% of known doors"),
    "portal_small": RecipeFacts("small", CPU, "10 min", "99.1% of known doors, 126 of 142 alive, batches of 16"),
    "instruction": RecipeFacts("tiny", CPU, "13 min", "100% of acts"),
    "instruction_small": RecipeFacts("small", GPU, "10 min", "84.1% of acts after 1,647 of 6,000 steps, batches of 16"),
    "instruction_paper": RecipeFacts("paper", GPU, "10 min", "99.97% of acts, nothing expired"),
    "collision": RecipeFacts("tiny", CPU, "5 min", "52.5% error (chance 75%); 224 / 130 / 88 alive"),
    "collision_dense": RecipeFacts("small", GPU, "1 min", "first of three lessons"),
    "collision_sparse": RecipeFacts("small", GPU, "2 min", "55.2% error, second of three lessons"),
    "collision_small": RecipeFacts("small", GPU, "8 min", "37.9% error after the two lessons (published 52.2%)"),
    "collision_mixed": RecipeFacts("small", GPU, "1 min", "42.3% error (published 52.2%), 902 alive"),
    "collision_long": RecipeFacts(
        "small", GPU, "14 min", "23.2% error, 29.9% with spans up to 32,768 (published 26.7, 36.7%)"
    ),
    "collision_paper": RecipeFacts("paper", "8 GPUs", "a day", NOT_RUN),
    "books": RecipeFacts(
        "tiny", CPU, "8 min", "2.964 bits a character (test) after 1,000 steps, 256 books; 125 / 39 alive"
    ),
    "books_small": RecipeFacts("small", GPU, "7 min", "1.624 bits a character after 1 min, 256 books"),
    "books_paper": RecipeFacts("paper", "8 GPUs", "days", NOT_RUN),
    "agent": RecipeFacts("tiny", CPU, "minutes", "depends on the environment"),
    "agent_corridor_tiny": RecipeFacts("tiny", CPU, "1 min", "99.6% or more of 1,024 episodes, three seeds"),
    "agent_corridor": RecipeFacts(
        "tiny", CPU, "5 min", "97.9% or more in every band, three seeds; 17 to 21 alive at 51 to 60"
    ),
    "agent_corridor_window": RecipeFacts("tiny", CPU, "4 min", "chance beyond 20 steps (in windows of 48)"),
    "agent_corridor_lesson": RecipeFacts(
        "tiny", CPU, "4 min", "100% of 1,024 episodes; agent_corridor_hard starts from it"
    ),
    "agent_corridor_hard": RecipeFacts(
        "small", CPU, "20 min", "99.5 to 99.8% up to 200, after the lesson, three seeds"
    ),
    "agent_portal_tiny": RecipeFacts("tiny", CPU, "5 min", "99.4% of 1,024 episodes, 1.03 times an explorer's steps"),
    "agent_portal": RecipeFacts("small", GPU, "7 min", "99.9%, as many steps as an explorer with perfect memory"),
    "agent_repeat_first": RecipeFacts("tiny", CPU, "5 min", "return 0.995 after 150 updates"),
    "agent_repeat_first_medium": RecipeFacts(
        "small", CPU, "40 min", "return 0.943; two more seeds 0.986 and 0.739 in validation; nothing deleted yet"
    ),
    "agent_repeat_previous": RecipeFacts("tiny", CPU, "2 min", "return 0.999, 3.9 alive"),
    "agent_repeat_previous_medium": RecipeFacts("small", CPU, "15 min", "return 1.000 and 0.989"),
}
"""By name of the recipe; a test checks that each has an entry."""
