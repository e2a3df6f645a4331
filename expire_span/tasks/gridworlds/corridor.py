"""Corridor: a coloured cue beside the first cell, a long corridor with coloured distractions, coloured doors at its end.

A 1 x L corridor. The cue, a ball, lies in the wall above cell 0. Boxes in wall niches have the same colours and mean nothing.
The K doors are in the walls above and below the last cells, two to a cell from the end backwards. Going through any door ends
the episode; the one with the cue's colour is right.

Actions: left, right, up, down. Reward: +1 for the right door, 0 for a wrong one, -0.005 for every step. Truncated after
4 L + 20 steps. With `passive` the agent moves right by itself and only chooses a door. With probability `recue_prob` a second
cue half-way replaces the first.
"""

from __future__ import annotations

from expire_span.settings.tasks import CorridorTask
from expire_span.tasks.hashing import mix_signed

from .arrays import Array, below, below_low, chance, ranks
from .engine import BALL, BOX, CLOSED, COLOURS, DOOR, DOWN, EMPTY, GREY, LEFT, RIGHT, UP, WALL, WorldEngine, cell

LENGTH, CUE, SHUFFLE, NICHE, RECUE, SECOND_CUE = range(6)
"""Purposes of draws."""
STEP_COST = 0.005


class Corridor(WorldEngine):
    name = "corridor"
    state = ("position",)
    num_actions = 4
    config: CorridorTask
    position: Array
    """[B]: the agent's cell."""
    length: Array
    """[B]: cells of the corridor."""
    middle: Array
    """[B]: the cell beside which a second cue may lie."""
    first_cue: Array
    """[B]: colour of the cue at the start."""
    second_cue: Array
    """[B]: colour of the second cue, where there is one."""
    recued: Array
    """[B]: whether there is a second cue."""
    target_slot: Array
    """[B]: place of the right door, counted from the end of the corridor backwards, above before below."""
    target: Array
    """[B]: colour of the right door."""
    door_colours: Array
    """[B, K]: colour of the door in each slot."""
    niche_keys: Array
    """[B]: key of the draws for the boxes in the walls."""

    def _build_tables(self) -> None:
        sides, offsets = self.arrays.arange(2)[None, :, None], self.offsets[:, None, :]
        # [1, 2, V]: places in the walls, two to a column, relative to the agent.
        self.wall_offsets = 2 * offsets + sides
        # [1, 2, V]: slots of doors at these places, relative to the agent's column.
        self.slot_offsets = sides - 2 * offsets
        self.changes = self.arrays.constant([-1, 1, 0, 0])  # how each action changes the agent's cell
        # Index at which a row's slots begin in the flattened door_colours.
        self.door_rows = self.rows[:, None, None] * self.config.colours

    def _draw_facts(self, keys: Array) -> dict[str, Array]:
        config, arrays = self.config, self.arrays
        purposes = mix_signed(keys + arrays.arange(6)[:, None])  # [6, n]
        draws = mix_signed(purposes)
        length = config.min_length + below(draws[LENGTH], config.max_length - config.min_length + 1)
        middle = length // 2
        room = (middle > 0) & (middle < length - (config.colours + 1) // 2)
        recued = chance(draws[RECUE], config.recue_prob) & room
        cues = below(draws, config.colours)
        target = arrays.where(recued, cues[SECOND_CUE], cues[CUE])
        slot_of, door_colours = self._draw_doors(purposes[SHUFFLE])
        return {
            "length": length,
            "middle": middle,
            "first_cue": cues[CUE],
            "second_cue": cues[SECOND_CUE],
            "recued": recued,
            "target": target,
            "target_slot": slot_of[arrays.arange(len(keys)), target],
            "door_colours": door_colours,
            "niche_keys": purposes[NICHE],
        }

    def _draw_doors(self, keys: Array) -> tuple[Array, Array]:
        """[n, K] each: the slot of each colour, and the colour in each slot."""
        slots = self.arrays.arange(self.config.colours)[None, :] + keys[:, None] * 0
        if not self.config.shuffled:
            return slots, slots
        slot_of = ranks(mix_signed(keys[:, None] + slots))
        return slot_of, ((slot_of[:, None, :] == slots[:, :, None]) * slots[:, None, :]).sum(-1)

    def _first_state(self, facts: dict[str, Array]) -> dict[str, Array]:
        return {"position": facts["length"] * 0}

    def _advance(self, actions: Array, running: Array) -> tuple[Array, Array, Array]:
        where, last = self.arrays.where, self.length - 1
        slot = 2 * (last - self.position) + (actions == DOWN)
        opened = (actions >= UP) & (slot < self.config.colours)
        moved = self.position + (~opened if self.config.passive else self.changes[actions])
        self.position = where(running, self.arrays.clamp(moved, last), self.position)
        success = opened & (slot == self.target_slot)
        return where(success, 1 - STEP_COST, -STEP_COST), opened, success

    def _limits(self) -> Array:
        return 4 * self.length + 20

    def observe(self) -> dict[str, Array]:
        columns = self.position[:, None] + self.offsets  # [B, V]
        inside = (columns >= 0) & (columns < self.length[:, None])
        cells = self.arrays.zeros(self.num_envs, 3, self.view, kind="int32")
        cells[:, 0::2] = self._walls(columns)
        cells[:, 1] = self.arrays.where(inside, EMPTY, cell(WALL, GREY))
        # Zero means unseen: the agent sees only the corridor and its walls.
        image = self.arrays.zeros(self.num_envs, self.view, self.view, 3, kind="uint8")
        half = self.view // 2
        image[:, half - 1 : half + 2] = self.arrays.bytes_of(cells)[..., :3]
        return {"image": image}

    def _walls(self, columns: Array) -> Array:
        """Cells above and below the corridor in view, [B, 2, V]."""
        where, config = self.arrays.where, self.config
        places = 2 * self.position[:, None, None] + self.wall_offsets
        # Slots count from the end of the corridor backwards; negative ones are beyond its end.
        slots = 2 * (self.length - 1 - self.position)[:, None, None] + self.slot_offsets
        draws = mix_signed(self.niche_keys[:, None, None] + places)
        # The first column, places 0 and 1, has no niche.
        niche = (places >= 2) & (slots >= 0) & chance(draws, config.niche_prob)
        cells = where(niche, cell(BOX, below_low(draws, config.colours)), cell(WALL, GREY))
        above = where(columns == 0, cell(BALL, self.first_cue)[:, None], cells[:, 0])
        if config.recue_prob > 0:
            again = (columns == self.middle[:, None]) & self.recued[:, None]
            above = where(again, cell(BALL, self.second_cue)[:, None], above)
        cells[:, 0] = above
        # Doors never extend back to the first column, since corridors are longer than that.
        door = (slots >= 0) & (slots < config.colours)
        return where(door, cell(DOOR, self._colours_of(slots), CLOSED), cells)

    def _colours_of(self, slots: Array) -> Array:
        """Colour of the door in each slot; slots beyond the doors give any colour."""
        if not self.config.shuffled:
            return slots
        return self.door_colours.reshape(-1)[self.door_rows + self.arrays.clamp(slots, self.config.colours - 1)]

    def optimal_action(self) -> Array:
        where, column = self.arrays.where, self._door_column()
        through = where(self.target_slot % 2 == 0, UP, DOWN)
        return where(self.position < column, RIGHT, where(self.position > column, LEFT, through))

    def oracle_steps(self) -> Array:
        return self._door_column() + 1

    def _door_column(self) -> Array:
        return self.length - 1 - self.target_slot // 2

    def needed(self) -> tuple[Array, Array]:
        where, half = self.arrays.where, self.view // 2
        sees_first = self.position <= half
        sees_second = self.recued & (abs(self.position - self.middle) <= half)
        replaced = self.recued & ~sees_second & (self.position < self.middle)
        until_second = self.steps + self.middle - half - self.position
        until_door = self.steps + abs(self._door_column() - self.position)
        fact = where(sees_second, 1, where(sees_first & (~self.recued | replaced), 0, -1))
        return fact, where((fact == 0) & replaced, until_second, until_door)

    def describe_hidden(self, row: int) -> str:
        length, at, colour = (int(x[row]) for x in (self.length, self.position, self.target))
        return f"cell {at + 1} of {length}, the {COLOURS[colour]} door is right"
