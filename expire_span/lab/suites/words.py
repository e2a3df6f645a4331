"""Words from which the suites make keys and lists."""

from __future__ import annotations

import random

_NOUNS = """acorn anchor apron arrow attic badge baker barrel basin basket beacon beetle bell bench blanket bottle branch
    bread bridge brook broom bucket buckle button cabin camel candle canoe canvas carpet carrot castle cedar cellar
    chain chalk cherry chimney cider cliff clock clover coach cobble collar comet copper coral cottage cradle crane
    cricket crown cushion dairy desert dolphin donkey drawer drum eagle easel ember engine falcon feather fence
    ferry fiddle flute forest fountain fox garden gate ginger glacier glove goblet goose granite grape hammer harbor
    harp hatch hazel hedge helmet heron hinge honey horse island ivory jacket jar jungle kettle kitchen ladder lagoon
    lantern lark lemon lever lily linen lizard locket loom magnet maple marble market meadow melon mill mirror mitten
    monkey moss muffin needle nettle oak oar olive onion orchard otter oven oyster paddle palace panda pantry parcel
    parrot pasture peach pebble pencil pepper piano pigeon pillow pine pirate planet plow pocket pond poppy pumpkin
    puzzle quarry quill rabbit radish raft raven ribbon river robin rocket rope rudder saddle sailor salmon satchel
    scarf shelf shell shovel shuttle sickle silver sparrow spider spoon spring squash stable statue stove swan table
    tailor teapot temple thimble thistle tiger timber torch tower trumpet tulip tunnel turnip turtle valley velvet
    violin wagon walnut walrus whistle willow window winter wizard wool wren yarn zebra"""
_ADJECTIVES = """ample ancient amber azure bashful blunt bold brave brief bright brisk broad calm candid careful cheerful clever
    coarse cosy crisp curious dainty daring deep dim distant eager early earnest elder faint fancy fierce floral fond
    frank fresh frosty gentle giant glad golden grand green happy hardy hasty heavy hollow honest humble icy jolly
    keen kind large late lively lofty lonely loyal lucky mellow merry mild misty modest narrow neat nimble noble odd
    pale patient plain playful polite proud quaint quick quiet rapid rare round royal rustic shiny silent simple sleek
    slender slow smooth snug solemn solid sour spare stark steady steep stern sturdy subtle sunny sweet swift tall
    tame tender thin thrifty tidy timid vivid warm wary wide wild wise witty young"""
NOUNS: tuple[str, ...] = tuple(_NOUNS.split())
ADJECTIVES: tuple[str, ...] = tuple(_ADJECTIVES.split())


def make_keys(rng: random.Random, count: int) -> list[str]:
    """Names of two words, such as brisk-lantern, that differ from each other."""
    return [make_pair(n) for n in rng.sample(range(len(ADJECTIVES) * len(NOUNS)), count)]


def make_pair(number: int) -> str:
    return f"{ADJECTIVES[number % len(ADJECTIVES)]}-{NOUNS[number // len(ADJECTIVES)]}"


def make_list(rng: random.Random, count: int) -> list[str]:
    """Words that differ from each other: single ones first, in random order, then pairs where more are needed."""
    plain = list(NOUNS + ADJECTIVES)
    rng.shuffle(plain)
    if count <= len(plain):
        return plain[:count]
    pairs = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), count - len(plain))
    return plain + [make_pair(n) for n in pairs]
