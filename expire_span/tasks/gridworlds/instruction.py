"""Instruction: someone talks for a long time, and a few of the sentences say what to do at which place.

Places lie in a square. During the talk the agent listens: moves have no effect and every act is wrong. Each step brings one
sentence: where you are, distracting talk, or "when you reach the mill open the box". Some instructions are cancelled or
replaced later. After "go now" the agent walks, and does at each place what was last asked for there.

Actions: left, right, up, down, then every verb with every object. Reward: +1 for the right act at the right place, -0.2 for any
other act. The episode ends when everything that is still asked for has been done.
"""

from __future__ import annotations

from expire_span.settings.tasks import InstructionTask
from expire_span.tasks.hashing import mix_signed

from . import sentences
from .arrays import Array, below, ranks
from .engine import COLOURS, DOWN, FLOOR, LEFT, RIGHT, UNSEEN, UP, WorldEngine, cell
from .sentences import BLAME, CANCEL, FIRST_TALK, GO, INSTRUCT, PRAISE, REPLACE, TEMPLATES, WHERE

START, PLACE_ORDER, TIME, CHANGE_TIME, CHANGE, PAIR, SECOND_PAIR, TALK, FILL = range(9)
"""Purposes of draws."""
NUM_OBJECTS = len(sentences.OBJECTS)
NEVER = 1 << 40
MOST_PLACES = 64
"""No world has more places."""
STAYS, CANCELLED, REPLACED = range(3)
"""What later happens to an instruction."""


class Instruction(WorldEngine):
    name = "instruction"
    state = ("place", "feedback", "done")
    num_actions = 4 + len(sentences.PAIRS)
    text_length = sentences.LENGTH
    config: InstructionTask
    place: Array
    """[B]: where the agent is."""
    feedback: Array
    """[B]: template of the answer to the last act, 0 for none."""
    done: Array
    """[B, M]: instructions that have been carried out."""
    start: Array
    """[B]: where the agent is at first."""
    goal: Array
    """[B, M]: place of each instruction."""
    change: Array
    """[B, M]: STAYS, CANCELLED or REPLACED."""
    told_at: Array
    """[B, M]: step at which each instruction is given."""
    changed_at: Array
    """[B, M]: step at which it is cancelled or replaced, or NEVER."""
    final_act: Array
    """[B, M]: the act that is right in the end."""
    said: Array
    """[B, 2M, 3]: template, place and act of the sentences that give instructions, then of those that change them."""
    said_at: Array
    """[B, 2M]: their steps."""
    done_at: Array
    """[B, M]: step at which the expert carries out each instruction."""
    whole_route: Array
    """[B]: steps of the episode for the expert."""
    talk_keys: Array
    """[B, 2]: keys of the draws for the talk and for the words that fill it."""

    def _build_tables(self) -> None:
        arange, constant, config = self.arrays.arange, self.arrays.constant, self.config
        held = set(sentences.HELD_OUT)
        allowed = {
            "seen": [p for p in sentences.PAIRS if p not in held],
            "held_out": list(sentences.HELD_OUT),
            "all": list(sentences.PAIRS),
        }[config.pairs]
        self.pairs = constant([verb * NUM_OBJECTS + thing for verb, thing in allowed])
        self.order = arange(config.instructions)[None, :]
        self.moves = constant([[self._move(p, action) for action in range(4)] for p in range(config.size**2)]).reshape(
            -1
        )
        places = range(config.size**2)
        self.costs = constant([[self._steps_between(p, goal) * MOST_PLACES + goal for goal in places] for p in places])
        self.costs = self.costs.reshape(-1)
        self.views = self._draw_views()
        self._build_speech()

    def _move(self, place: int, action: int) -> int:
        """The place to which a move leads; at a wall the agent stays."""
        size = self.config.size
        y, x = divmod(place, size)
        x = min(max(x + (action == RIGHT) - (action == LEFT), 0), size - 1)
        y = min(max(y + (action == DOWN) - (action == UP), 0), size - 1)
        return y * size + x

    def _steps_between(self, place: int, goal: int) -> int:
        (y, x), (to_y, to_x) = divmod(place, self.config.size), divmod(goal, self.config.size)
        return abs(y - to_y) + abs(x - to_x)

    def _build_speech(self) -> None:
        """Build the tables of which sentences may occur at which step, and of their words."""
        constant, config = self.arrays.constant, self.config
        half, count = config.talk // 2, config.instructions
        early, late = half // count, (config.talk - half) // count  # the shares of `_times`
        candidates = [min(t // early, count - 1) for t in range(half)]
        candidates += [count + min((t - half) // late, count - 1) for t in range(half, config.talk)]
        # For each step of the talk, the index in `said` of the only sentence that may fall on it.
        self.candidates = constant([*candidates, 0])
        self.first_candidates = self.rows * 2 * count  # where a row's sentences begin in flat arrays
        slots = [slot for slot, _ in sentences.SLOTS.values()]  # -1, -2, ...
        templates = [sentences.encode_template(template) for template in TEMPLATES]
        self.fixed_words = constant([[max(word, 0) for word in template] for template in templates])
        self.open_slots = constant([[1 + slots.index(w) if w < 0 else 0 for w in template] for template in templates])
        self.first_fillers = self.rows[:, None] * (1 + len(slots))
        firsts = [sentences.first_id(group) for _, group in sentences.SLOTS.values()]
        self.first_words = constant([0, *firsts])[None, :]
        self.limits = constant([config.size**2, len(sentences.PAIRS), len(sentences.NAMES), len(sentences.ADJECTIVES)])
        self.one_two = constant([1, 2])

    # Episodes

    def _draw_facts(self, keys: Array) -> dict[str, Array]:
        arrays, config, order = self.arrays, self.config, self.order
        purposes = mix_signed(keys + arrays.arange(9)[:, None])  # [9, n]
        draws = mix_signed(purposes[:, :, None] + order)  # [9, n, M]
        rank = ranks(mix_signed(purposes[PLACE_ORDER][:, None] + arrays.arange(config.size**2)))  # [n, P]
        places = arrays.arange(config.size**2)[None, None, :]
        goal = ((rank[:, None, :] == order[:, :, None]) * places).sum(-1)  # [n, M]
        change = self._changes(draws[CHANGE])
        half = config.talk // 2
        told_at = self._times(draws[TIME], 0, half)
        later = self._times(draws[CHANGE_TIME], half, config.talk - half)
        changed_at = arrays.where(change == STAYS, NEVER, later)
        first = self.pairs[below(draws[PAIR], len(self.pairs))]
        second = self.pairs[below(draws[SECOND_PAIR], len(self.pairs))]
        start = below(draws[START, :, 0], config.size**2)
        done_at, whole_route = self._expert_route(start, goal, change)
        return {
            "start": start,
            "goal": goal,
            "change": change,
            "told_at": told_at,
            "changed_at": changed_at,
            "final_act": arrays.where(change == REPLACED, second, first),
            "said": self._sentences(goal, change, first, second),
            "said_at": arrays.join(told_at, changed_at),
            "done_at": done_at,
            "whole_route": whole_route,
            "talk_keys": purposes[TALK : FILL + 1].T,
        }

    def _first_state(self, facts: dict[str, Array]) -> dict[str, Array]:
        start = facts["start"]
        return {"place": start, "feedback": start * 0, "done": facts["goal"] < 0}

    def _sentences(self, goal: Array, change: Array, first: Array, second: Array) -> Array:
        """Template, place and act of each instruction and of its change, [n, 2M, 3]."""
        arrays = self.arrays
        changes = arrays.where(change == CANCELLED, CANCEL, REPLACE)
        template = arrays.join(goal * 0 + INSTRUCT, changes)
        return arrays.stack([template, arrays.join(goal, goal), arrays.join(first, second)])

    def _changes(self, draws: Array) -> Array:
        config, share = self.config, below(draws, 1 << 20)
        lower = int(config.cancel_prob * (1 << 20))
        upper = int((config.cancel_prob + config.replace_prob) * (1 << 20))
        cancelled = (share < lower) & (self.order > 0)
        replaced = (share >= lower) & (share < upper)
        return self.arrays.where(cancelled, CANCELLED, self.arrays.where(replaced, REPLACED, STAYS))

    def _times(self, draws: Array, start: int, length: int) -> Array:
        """One step in each of M equal parts of the talk from `start` on, so that no two sentences fall on the same step."""
        share = length // self.config.instructions
        return start + self.order * share + below(draws, share)

    def _expert_route(self, start: Array, goals: Array, change: Array) -> tuple[Array, Array]:
        """The step at which the expert carries out each instruction [n, M], and its total number of steps [n]. It always goes
        to the nearest place."""
        where, open_ = self.arrays.where, change != CANCELLED
        clock, place = start * 0 + self.config.talk, start
        done_at = goals * 0
        for _ in range(self.config.instructions):
            chosen, least = self._nearest(place, goals, open_)
            any_left = least < NEVER
            clock = where(any_left, clock + least // MOST_PLACES + 1, clock)
            done_at = where(chosen, clock[:, None] - 1, done_at)
            place = where(any_left, least % MOST_PLACES, place)
            open_ = open_ & ~chosen
        return done_at, clock

    def _nearest(self, place: Array, goals: Array, open_: Array) -> tuple[Array, Array]:
        """The open instruction whose place is nearest; of equally near ones the smallest place.

        [n, M], True at it; and [n], its number of steps * MOST_PLACES + its place, or NEVER where none is open.
        """
        cost = self.arrays.where(open_, self.costs[place[:, None] * self.config.size**2 + goals], NEVER)
        least = cost.min(-1) if self.arrays.is_numpy else cost.amin(-1)
        return open_ & (cost == least[:, None]), least

    # Steps

    @property
    def shortest(self) -> int:
        return self.config.talk  # the first instruction is never cancelled, and acts count only after the talk

    @property
    def listening(self) -> Array:
        return self.steps < self.config.talk

    def still_open(self) -> Array:
        """[B, M]: instructions that are still to be done."""
        return (self.change != CANCELLED) & ~self.done

    def _advance(self, actions: Array, running: Array) -> tuple[Array, Array, Array]:
        where = self.arrays.where
        walking, acts = running & ~self.listening, actions >= 4
        still_open = self.still_open()
        here = (self.goal == self.place[:, None]) & still_open & (self.final_act == (actions - 4)[:, None])
        hit = here & (walking & acts)[:, None]  # [B, M]
        self.done = self.done | hit
        right = hit.any(-1)
        wrong = running & acts & ~right
        moved = self.moves[self.place * 4 + self.arrays.clamp(actions, 3)]
        self.place = where(walking & ~acts, moved, self.place)
        self.feedback = where(running, where(right, PRAISE, where(wrong, BLAME, 0)), self.feedback)
        ended = walking & ~(still_open & ~hit).any(-1)
        return where(right, 1.0, where(wrong, -0.2, 0.0)), ended, ended

    def _limits(self) -> int:
        return self.config.talk + 8 * self.config.size * (self.config.instructions + 1)

    # Observations

    def observe(self) -> dict[str, Array]:
        return {"image": self.views[self.place], "text": self.arrays.cast(self.sentence(), "int32")}

    def _draw_views(self) -> Array:
        """What is seen from every place: [P, V, V, 3]."""
        size, number = self.config.size, self.arrays.arange(self.config.size**2)[:, None, None]
        x, y = number % size + self.offsets[:, None, :], number // size + self.offsets[:, :, None]
        inside = (x >= 0) & (x < size) & (y >= 0) & (y < size)
        place = y * size + x
        cells = cell(FLOOR, place % len(COLOURS), place // len(COLOURS))
        return self.paint(self.arrays.where(inside, cells, UNSEEN))

    def sentence(self) -> Array:
        """[B, S]: word ids of the present step."""
        draws = mix_signed(self.talk_keys + self.steps[:, None])  # [B, 2]: what is talked about, and what fills it
        more = mix_signed(draws[:, :, None] + self.one_two).reshape(-1, 4)
        place, act, name, adjective = below(more, self.limits).T
        template, place, act = self._topic(draws[:, 0], place, act)
        words = [place * 0, place, act // NUM_OBJECTS, act % NUM_OBJECTS, name, adjective]
        fillers = self.arrays.stack(words) + self.first_words  # [B, 6]
        return self.fixed_words[template] + fillers.reshape(-1)[self.first_fillers + self.open_slots[template]]

    def _topic(self, draws: Array, place: Array, act: Array) -> tuple[Array, Array, Array]:
        """Template of the present sentence, and the place and the act (verb and object) that it names.

        `place` and `act` are those of distracting talk.
        """
        where = self.arrays.where
        kinds = len(TEMPLATES) - FIRST_TALK + 1
        talk = below(draws, kinds)
        template = where(talk == kinds - 1, WHERE, FIRST_TALK + talk)
        template = where(self.listening, template, where(self.steps == self.config.talk, GO, WHERE))
        template = where(self.feedback > 0, self.feedback, template)
        place = where(template == WHERE, self.place, place)
        candidate = self.first_candidates + self.candidates[self.arrays.clamp(self.steps, self.config.talk)]
        spoken = self.said_at.reshape(-1)[candidate] == self.steps
        said = self.said.reshape(-1, 3)[candidate].T
        template, place, act = (where(spoken, new, old) for new, old in zip(said, (template, place, act)))
        return template, place, act

    # The expert

    def optimal_action(self) -> Array:
        where, open_ = self.arrays.where, self.still_open()
        least = self._nearest(self.place, self.goal, open_)[1]
        move = self.move_towards(where(least < NEVER, least % MOST_PLACES, 0))
        here = (self.goal == self.place[:, None]) & open_
        act = 4 + (here * self.final_act).sum(-1)
        return where(self.listening, LEFT, where(here.any(-1), act, move))

    def move_towards(self, goal: Array) -> Array:
        """The move that brings the agent nearer to a place: along the row first."""
        where, size = self.arrays.where, self.config.size
        x, to_x, y, to_y = self.place % size, goal % size, self.place // size, goal // size
        return where(x < to_x, RIGHT, where(x > to_x, LEFT, where(y < to_y, DOWN, UP)))

    def oracle_steps(self) -> Array:
        return self.whole_route

    def needed(self) -> tuple[Array, Array]:
        """An instruction is needed until it is changed or carried out, a change until the last act."""
        where, now = self.arrays.where, self.steps[:, None]
        told, changed = self.told_at == now, self.changed_at == now
        until_told = where(self.change != STAYS, self.changed_at, self.done_at)
        until_changed = where(self.change == CANCELLED, self.whole_route[:, None] - 1, self.done_at)
        until = (told * until_told + changed * until_changed).sum(-1)
        spoken = told | changed
        fact = (spoken * self.order).sum(-1)
        return where(spoken.any(-1), fact, -1), until

    def describe_hidden(self, row: int) -> str:
        open_, parts = self.still_open()[row], []
        for m in range(self.config.instructions):
            if bool(open_[m]):
                act, place = int(self.final_act[row, m]), int(self.goal[row, m])
                verb, thing = sentences.VERBS[act // NUM_OBJECTS], sentences.OBJECTS[act % NUM_OBJECTS]
                parts.append(f"{verb} the {thing} at the {sentences.PLACES[place]}")
        return "to do: " + ("; ".join(parts) or "nothing")
