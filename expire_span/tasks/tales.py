"""Little tales from a small grammar, in which what is said early matters late. Ours, endless, the same on every machine.

Each tale names a hero, a trade and a home; then come things that happen, in the past tense, and things that are said, in
quotes and in the present tense. Pronouns follow the hero; what is carried is put down again; the last sentence repeats name,
trade and home. A model that predicts words well has to remember all of these.
"""

from __future__ import annotations

import random

SHE = ("Anna", "Clara", "Edda", "Greta", "Ida", "Lena")
HE = ("Boris", "Daniel", "Felix", "Hugo", "Jonas", "Karl")
TRADES = ("baker", "fisher", "miller", "weaver", "painter", "sailor", "smith", "teacher")
HOMES = ("mountains", "harbour", "forest", "valley", "islands", "city")
THINGS = ("lamp", "basket", "letter", "rope", "kettle", "map", "violin", "coat")
PLACES = ("bridge", "market", "mill", "river", "tower", "garden", "inn", "well")
WEATHER = ("rain", "snow", "wind", "fog", "sun")
KIN = ("sister", "brother", "mother", "father", "friend", "neighbour")
DEEDS = (
    ("walked", "walk"),
    ("waited", "wait"),
    ("worked", "work"),
    ("rested", "rest"),
    ("sang", "sing"),
    ("laughed", "laugh"),
)
MOODS = ("tired", "happy", "hungry", "quiet", "brave", "late")


def tell_tales(count: int, seed: int = 0) -> str:
    """So many tales, one a paragraph."""
    draw = random.Random(seed)
    return "\n\n".join(tell_tale(draw) for _ in range(count)) + "\n"


def tell_tale(draw: random.Random) -> str:
    is_she = draw.random() < 0.5
    name, trade, home = draw.choice(SHE if is_she else HE), draw.choice(TRADES), draw.choice(HOMES)
    they, their = ("she", "her") if is_she else ("he", "his")
    thing = draw.choice(THINGS)
    story = [f"This is the tale of {name}, the {trade} from the {home}."]
    story.append(f"One day {they} took {their} {thing} and went to the {draw.choice(PLACES)}.")
    story += [_happen(draw, they, their) for _ in range(draw.randint(2, 6))]
    story.append(f"In the evening {they} put down {their} {thing} and went home to the {home}.")
    story.append(f"That was the tale of {name}, the {trade} from the {home}.")
    return " ".join(story)


def _happen(draw: random.Random, they: str, their: str) -> str:
    """One sentence of what happened, or of what was said: within quotes all verbs are in the present."""
    past, present = draw.choice(DEEDS)
    place, kin = draw.choice(PLACES), draw.choice(KIN)
    kind = draw.randrange(4)
    if kind == 0:
        return f"There was {draw.choice(WEATHER)} at the {place}, and {they} {past} there."
    if kind == 1:
        return f"Then {they} {past} by the {place} until {their} {kin} came."
    said = [f"I am {draw.choice(MOODS)}", f"I {present} at the {place}", f"my {kin} is {draw.choice(MOODS)}"]
    draw.shuffle(said)
    words = ", and ".join(said[: draw.randint(1, 3)])
    return f'"{words}," {they} said to {their} {draw.choice(KIN)}.' if kind == 2 else f'{they.title()} said: "{words}."'
