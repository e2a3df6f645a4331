"""What to expect of each recipe: the hardware it is meant for, how long it takes, the score. Standard library only.

Scores were measured with the recipe as it is, or are "not run"; docs/results.md has the whole record.
"""

from __future__ import annotations

from dataclasses import dataclass

CPU, GPU = "2 CPU cores", "one H200"
NOT_RUN = "not run"


@dataclass(frozen=True)
class RecipeFacts:
    """Expectations of one recipe."""

    hardware: str
    """Hardware for which it is meant."""
    time: str
    """Time that it takes on that hardware, with all its stages."""
    score: str
    """Score that it reached, or "not run"."""


FACTS: dict[str, RecipeFacts] = {
    "recall": RecipeFacts(CPU, "1 min", "100% correct, 4.8 alive"),
    "entrances": RecipeFacts(CPU, "1 min", "99.9% correct, 4.5 / 6.4 alive"),
    "words": RecipeFacts(CPU, "1 min", "perplexity 1.74 on the built-in tales (test)"),
    "text_tiny": RecipeFacts(CPU, "15 min", "depends on the file"),
    "text": RecipeFacts(GPU, "10 min", NOT_RUN),
    "enwik8": RecipeFacts(GPU, "7 min", "1.052 bits a byte (test)"),
    "enwik8_long": RecipeFacts(GPU, "25 min", "1.0025 bits a byte (test), with --train.seconds 1485"),
    "enwik8_paper": RecipeFacts("8 GPUs", "days", NOT_RUN),
    "enwik8_paper_8l": RecipeFacts(GPU, "2 h", NOT_RUN),
    "books_tiny": RecipeFacts(
        CPU, "8 min", "2.964 bits a character (test) after 1,000 steps, 256 books; 125 / 39 alive"
    ),
    "books": RecipeFacts(GPU, "7 min", "1.624 bits a character after 1 min, 256 books"),
    "books_paper": RecipeFacts("8 GPUs", "days", NOT_RUN),
    "shipped": RecipeFacts(GPU, "6 min", "1.355 bits a byte (test), with --train.seconds 350"),
    "copy_tiny": RecipeFacts(CPU, "10 min", "100% of 512 episodes with 453 of 1,024 alive"),
    "copy": RecipeFacts(GPU, "2 min", "100% of 128 episodes with 3,137 of 8,192 alive"),
    "copy_paper": RecipeFacts(GPU, "6 min", "100% at 131,072 tokens, nothing expired"),
    "corridor_tiny": RecipeFacts(CPU, "2 min", "100%, 8.9 alive"),
    "corridor": RecipeFacts(CPU, "15 min", "100%, 10.4 / 9.0 alive, after 561 of its 2,000 steps, batches of 64"),
    "portal_tiny": RecipeFacts(CPU, "2 min", "100% of known doors"),
    "portal": RecipeFacts(CPU, "10 min", "99.1% of known doors, 126 of 142 alive, batches of 16"),
    "instruction_tiny": RecipeFacts(CPU, "13 min", "100% of acts"),
    "instruction": RecipeFacts(GPU, "10 min", "84.1% of acts after 1,647 of 6,000 steps, batches of 16"),
    "instruction_paper": RecipeFacts(GPU, "10 min", "99.97% of acts, nothing expired"),
    "collision_tiny": RecipeFacts(CPU, "5 min", "52.5% error (chance 75%); 224 / 130 / 88 alive"),
    "collision": RecipeFacts(
        GPU, "15 min", "23.2% error, 29.9% with spans up to 32,768, as the paper describes the game"
    ),
    "collision_mixed": RecipeFacts(GPU, "1 min", "42.3% error, as the paper describes the game, 902 alive"),
    "collision_lessons": RecipeFacts(GPU, "11 min", "37.9% error, as the paper describes the game"),
    "collision_paper": RecipeFacts("8 GPUs", "a day", NOT_RUN),
    "agent": RecipeFacts(CPU, "minutes", "depends on the environment"),
    "agent_corridor_tiny": RecipeFacts(CPU, "1 min", "99.6% or more of 1,024 episodes, three seeds"),
    "agent_corridor": RecipeFacts(CPU, "5 min", "97.9% or more in every band, three seeds; 17 to 21 alive at 51 to 60"),
    "agent_corridor_window": RecipeFacts(CPU, "4 min", "chance beyond 20 steps (in windows of 48)"),
    "agent_corridor_hard": RecipeFacts(CPU, "24 min", "99.5 to 99.8% up to 200, three seeds"),
    "agent_portal_tiny": RecipeFacts(CPU, "5 min", "99.4% of 1,024 episodes, 1.03 times an explorer's steps"),
    "agent_portal": RecipeFacts(GPU, "7 min", "99.9%, as many steps as an explorer with perfect memory"),
    "agent_tmaze_tiny": RecipeFacts(CPU, "5 min", NOT_RUN),
    "agent_tmaze": RecipeFacts(CPU, "10 min", NOT_RUN),
    "agent_repeat_first_tiny": RecipeFacts(CPU, "5 min", "return 0.995 after 150 updates"),
    "agent_repeat_first": RecipeFacts(
        CPU, "40 min", "return 0.943; two more seeds 0.986 and 0.739 in validation; nothing deleted yet"
    ),
    "agent_repeat_previous_tiny": RecipeFacts(CPU, "2 min", "return 0.999, 3.9 alive"),
    "agent_repeat_previous": RecipeFacts(CPU, "15 min", "return 1.000 and 0.989"),
}
"""By name of the recipe; a test checks that each has an entry."""
