"""Instruction: someone talks for a long time, and a few of the sentences say what to do at which place.

Places lie in a square. During the talk the agent listens: moves have no effect and every act is wrong. Each step brings one
sentence: where you are, distracting talk, or "when you reach the mill open the box". Some instructions are cancelled or
replaced later. After "go now" the agent walks, and does at each place what was last asked for there.

Actions: left, right, up, down, then every verb with every object. Reward: +1 for the right act at the right place, -0.2 for any
other act. The episode ends when everything that is still asked for has been done.
"""

from __future__ import annotations

from typing import Any

from expire_span.task_configs import InstructionTask

from . import sentences
from .arrays import Array, Backend, below, mix, ranks
from .engine import COLOURS, DOWN, FLOOR, LEFT, RIGHT, UNSEEN, UP, Engine, cell
from .sentences import BLAME, CANCEL, FIRST_TALK, GO, INSTRUCT, PRAISE, REPLACE, TEMPLATES, WHERE

START, PLACE_ORDER, TIME, CHANGE_TIME, CHANGE, PAIR, SECOND_PAIR, TALK, FILL = range(9)
"""Purposes of draws."""
NUM_OBJECTS = len(sentences.OBJECTS)
NEVER = 1 << 40


class Instruction(Engine):
    name = "instruction"
    num_actions = 4 + len(sentences.PAIRS)
    text_length = sentences.LENGTH
    config: InstructionTask

    def __init__(
        self, config: InstructionTask, num_envs: int, *, backend: Backend = "numpy", device: str = "cpu"
    ) -> None:
        self._tables: dict[str, Any] = {}
        super().__init__(config, num_envs, backend=backend, device=device)

    def _build_tables(self) -> None:
        constant, config = self.arrays.constant, self.config
        held = set(sentences.HELD_OUT)
        allowed = {
            "seen": [p for p in sentences.PAIRS if p not in held],
            "held_out": list(sentences.HELD_OUT),
            "all": list(sentences.PAIRS),
        }[config.pairs]
        self._tables = {
            "pairs": constant([verb * NUM_OBJECTS + thing for verb, thing in allowed]),
            "templates": constant([sentences.encode_template(template) for template in TEMPLATES]),
            "order": self.arrays.arange(config.instructions)[None, :],
            "places": self.arrays.arange(config.size**2)[None, :],
        }

    # Episodes

    def _begin(self, rows: Array) -> None:
        arrays, config = self.arrays, self.config
        where = arrays.where
        if not self._tables:
            self._build_tables()
            self.place, self.feedback = arrays.zeros(self.num_envs), arrays.zeros(self.num_envs)
            self.done = arrays.falses(self.num_envs, config.instructions)
        order = self._tables["order"] + self.rows[:, None] * 0  # [B, M]
        places = self._tables["places"] + self.rows[:, None] * 0  # [B, P]
        rank = ranks(self.draw(PLACE_ORDER, places))
        self.goal = ((rank[:, None, :] == order[:, :, None]) * places[:, None, :]).sum(-1)  # [B, M]: place of each
        self.change = self._changes(order)  # [B, M]: 0 stays, 1 is cancelled, 2 is replaced
        half = config.talk // 2
        self.told_at = self._times(TIME, order, 0, half)
        self.changed_at = where(self.change > 0, self._times(CHANGE_TIME, order, half, config.talk - half), NEVER)
        pairs = self._tables["pairs"]
        self.first_act = pairs[below(self.draw(PAIR, order), len(pairs))]
        self.second_act = pairs[below(self.draw(SECOND_PAIR, order), len(pairs))]
        self.final_act = where(self.change == 2, self.second_act, self.first_act)
        start = below(self.draw(START), config.size**2)
        self.place = where(rows, start, self.place)
        self.feedback = where(rows, 0, self.feedback)
        self.done = self.done & ~rows[:, None]
        self.done_at, self.whole_route = self._expert_route(start)

    def _changes(self, order: Array) -> Array:
        config, draws = self.config, self.draw(CHANGE, order)
        share = below(draws, 1 << 20)
        cancelled = (share < int(config.cancel_prob * (1 << 20))) & (order > 0)
        upper = int((config.cancel_prob + config.replace_prob) * (1 << 20))
        replaced = (share >= int(config.cancel_prob * (1 << 20))) & (share < upper)
        return self.arrays.where(cancelled, 1, self.arrays.where(replaced, 2, 0))

    def _times(self, purpose: int, order: Array, start: int, length: int) -> Array:
        """A step within equal shares of a stretch of the talk, so that no two sentences fall on one step."""
        share = length // self.config.instructions
        return start + order * share + below(self.draw(purpose, order), share)

    def _expert_route(self, start: Array) -> tuple[Array, Array]:
        """Step at which the expert does each instruction [B, M], and its steps in all [B]: always on to the nearest place."""
        where, open_ = self.arrays.where, self.change != 1
        clock, place = self.rows * 0 + self.config.talk, start
        done_at = self.goal * 0
        for _ in range(self.config.instructions):
            chosen = self._nearest(place, open_)  # [B, M], one True a row, or none
            any_left = chosen.any(-1)
            goal = (chosen * self.goal).sum(-1)
            clock = where(any_left, clock + self._distance(place, goal) + 1, clock)
            done_at = where(chosen, clock[:, None] - 1, done_at)
            place = where(any_left, goal, place)
            open_ = open_ & ~chosen
        return done_at, clock

    def _distance(self, place: Array, goal: Array) -> Array:
        size = self.config.size
        return abs(place // size - goal // size) + abs(place % size - goal % size)

    def _nearest(self, place: Array, open_: Array) -> Array:
        """[B, M]: True at the open instruction whose place is nearest; of equally near ones the smallest place."""
        cost = self._distance(place[:, None], self.goal) * 64 + self.goal
        cost = self.arrays.where(open_, cost, NEVER)
        least = cost.min(-1) if self.arrays.is_numpy else cost.amin(-1)
        return open_ & (cost == least[:, None])

    # Steps

    @property
    def listening(self) -> Array:
        return self.steps < self.config.talk

    def still_open(self) -> Array:
        """[B, M]: instructions that are still to be done."""
        return (self.change != 1) & ~self.done

    def _advance(self, actions: Array, running: Array) -> tuple[Array, Array, Array]:
        where, size = self.arrays.where, self.config.size
        walking = running & ~self.listening
        acts = actions >= 4
        here = (self.goal == self.place[:, None]) & self.still_open() & (self.final_act == (actions - 4)[:, None])
        hit = here & (walking & acts)[:, None]  # [B, M]
        self.done = self.done | hit
        right = hit.any(-1)
        wrong = running & acts & ~right
        x = (self.place % size + where(actions == RIGHT, 1, where(actions == LEFT, -1, 0))).clip(0, size - 1)
        y = (self.place // size + where(actions == DOWN, 1, where(actions == UP, -1, 0))).clip(0, size - 1)
        self.place = where(walking & ~acts, y * size + x, self.place)
        self.feedback = where(running, where(right, PRAISE, where(wrong, BLAME, 0)), self.feedback)
        ended = walking & ~self.still_open().any(-1)
        return where(right, 1.0, where(wrong, -0.2, 0.0)), ended, ended

    def _limits(self) -> int:
        return self.config.talk + 8 * self.config.size * (self.config.instructions + 1)

    # Observations

    def observe(self) -> dict[str, Array]:
        where, size = self.arrays.where, self.config.size
        x = (self.place % size)[:, None, None] + self.offsets[:, None, :]
        y = (self.place // size)[:, None, None] + self.offsets[:, :, None]
        inside = (x >= 0) & (x < size) & (y >= 0) & (y < size)
        place = y * size + x
        image = self.paint(where(inside, cell(FLOOR, place % len(COLOURS), place // len(COLOURS)), UNSEEN))
        return {"image": image, "text": self.arrays.cast(self.sentence(), "int32")}

    def sentence(self) -> Array:
        """[B, S]: word ids of the present step."""
        where = self.arrays.where
        template, place, act = self._topic()
        draws = self.draw(FILL, self.steps[:, None])[:, 0]
        verb, thing = act // NUM_OBJECTS, act % NUM_OBJECTS
        name = below(mix(draws + 1), len(sentences.NAMES))
        adjective = below(mix(draws + 2), len(sentences.ADJECTIVES))
        words = self._tables["templates"][template]  # [B, S]
        for (slot, group), value in zip(sentences.SLOTS.values(), (place, verb, thing, name, adjective)):
            words = where(words == slot, (sentences.first_id(group) + value)[:, None], words)
        return words

    def _topic(self) -> tuple[Array, Array, Array]:
        """Template of the present sentence, and the place and the act (verb and object) that it names."""
        where, now = self.arrays.where, self.steps[:, None]
        told, changed = self.told_at == now, self.changed_at == now  # [B, M]
        draws = self.draw(TALK, now)[:, 0]
        kinds = len(TEMPLATES) - FIRST_TALK + 1
        talk = below(draws, kinds)
        template = where(talk == kinds - 1, WHERE, FIRST_TALK + talk)
        place = below(mix(draws + 1), self.config.size**2)
        act = below(mix(draws + 2), len(sentences.PAIRS))
        template = where(self.listening, template, where(self.steps == self.config.talk, GO, WHERE))
        template = where(self.feedback > 0, self.feedback, template)
        told_any, changed_any = told.any(-1), changed.any(-1)
        template = where(told_any, INSTRUCT, template)
        cancelled = (changed & (self.change == 1)).any(-1)
        template = where(changed_any, where(cancelled, CANCEL, REPLACE), template)
        spoken = told | changed
        place = where(template == WHERE, self.place, place)
        place = where(spoken.any(-1), (spoken * self.goal).sum(-1), place)
        act = where(told_any, (told * self.first_act).sum(-1), act)
        act = where(changed_any, (changed * self.second_act).sum(-1), act)
        return template, place, act

    # The expert

    def optimal_action(self) -> Array:
        where, open_ = self.arrays.where, self.still_open()
        goal = (self._nearest(self.place, open_) * self.goal).sum(-1)
        move = self.move_towards(goal)
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
        """An instruction is of use until it is changed or done, a change until the last act."""
        where, now = self.arrays.where, self.steps[:, None]
        told, changed = self.told_at == now, self.changed_at == now
        until_told = where(self.change > 0, self.changed_at, self.done_at)
        until_changed = where(self.change == 1, self.whole_route[:, None] - 1, self.done_at)
        until = (told * until_told + changed * until_changed).sum(-1)
        spoken = told | changed
        fact = (spoken * self._tables["order"]).sum(-1)
        return where(spoken.any(-1), fact, -1), until

    def describe_hidden(self, row: int) -> str:
        open_, parts = self.still_open()[row], []
        for m in range(self.config.instructions):
            if bool(open_[m]):
                act, place = int(self.final_act[row, m]), int(self.goal[row, m])
                verb, thing = sentences.VERBS[act // NUM_OBJECTS], sentences.OBJECTS[act % NUM_OBJECTS]
                parts.append(f"{verb} the {thing} at the {sentences.PLACES[place]}")
        return "to do: " + ("; ".join(parts) or "nothing")
