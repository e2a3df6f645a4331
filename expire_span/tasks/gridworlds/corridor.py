"""Corridor: a coloured cue beside the first cell, a long corridor with coloured distractions, coloured doors at its end.

A 1 x L corridor. The cue, a ball, lies in the wall above cell 0. Boxes in wall niches have the same colours and mean nothing.
The K doors are in the walls above and below the last cells, two to a cell from the end backwards. Going through any door ends
the episode; the one with the cue's colour is right.

Actions: left, right, up, down. Reward: +1 for the right door, 0 for a wrong one, -0.005 for every step. Truncated after
4 L + 20 steps. With `passive` the agent is carried to the right by itself, and only the choice of a door is its own. With
`recue_prob` a second cue half-way replaces the first.
"""

from __future__ import annotations

from expire_span.task_configs import CorridorTask

from .arrays import Array, below, below_low, chance, ranks
from .engine import BALL, BOX, CLOSED, COLOURS, DOOR, DOWN, EMPTY, GREY, LEFT, RIGHT, UNSEEN, UP, WALL, Engine, cell

LENGTH, CUE, SHUFFLE, NICHE, RECUE, SECOND_CUE = range(6)
"""Purposes of draws."""
STEP_COST = 0.005


class Corridor(Engine):
    name = "corridor"
    num_actions = 4
    config: CorridorTask

    def _begin(self, rows: Array) -> None:
        config, where = self.config, self.arrays.where
        self.length = config.min_length + below(self.draw(LENGTH), config.max_length - config.min_length + 1)
        self.middle = self.length // 2
        first, second = below(self.draw(CUE), config.colours), below(self.draw(SECOND_CUE), config.colours)
        room = (self.middle > 0) & (self.middle < self.length - (config.colours + 1) // 2)
        self.recued = chance(self.draw(RECUE), config.recue_prob) & room
        self.first_cue, self.second_cue = first, second
        self.target = where(self.recued, second, first)
        slots = self.arrays.arange(config.colours)[None, :] + self.rows[:, None] * 0  # [B, K]: slot of each colour
        self.slot_of = ranks(self.draw(SHUFFLE, slots)) if config.shuffled else slots
        self.target_slot = self.slot_of[self.rows, self.target]
        self.position = where(rows, 0, self.position) if hasattr(self, "position") else self.rows * 0

    def _advance(self, actions: Array, running: Array) -> tuple[Array, Array, Array]:
        where, last = self.arrays.where, self.length - 1
        slot = 2 * (last - self.position) + (actions == DOWN)
        opened = ((actions == UP) | (actions == DOWN)) & (slot < self.config.colours)
        if self.config.passive:
            change = where(opened, 0, 1)
        else:
            change = where(actions == RIGHT, 1, where(actions == LEFT, -1, 0))
        moved = (self.position + change).clip(min=0)
        self.position = where(running, where(moved > last, last, moved), self.position)
        success = opened & (slot == self.target_slot)
        return where(success, 1 - STEP_COST, -STEP_COST), opened, success

    def _limits(self) -> Array:
        return 4 * self.length + 20

    def observe(self) -> dict[str, Array]:
        columns = self.position[:, None] + self.offsets  # [B, V]
        inside = (columns >= 0) & (columns < self.length[:, None])
        sides = self._walls(columns, inside)  # [B, V, 2]: above and below the corridor
        half = self.view // 2
        parts = [columns * 0 + UNSEEN] * self.view
        middle = self.arrays.where(inside, EMPTY, cell(WALL, GREY))
        parts[half - 1 : half + 2] = sides[..., 0], middle, sides[..., 1]
        return {"image": self.paint(self.arrays.stack(parts).swapaxes(1, 2))}

    def _walls(self, columns: Array, inside: Array) -> Array:
        """Cells above and below the corridor at the given columns, [B, V, 2]."""
        where, config = self.arrays.where, self.config
        sides = self.arrays.arange(2)[None, None, :]
        columns, inside = columns[..., None], inside[..., None]  # [B, V, 1]
        slot = 2 * (self.length[:, None, None] - 1 - columns) + sides  # [B, V, 2]
        draws = self.draw(NICHE, 2 * columns + sides)
        niche = inside & (columns > 0) & chance(draws, config.niche_prob)
        cells = where(niche, cell(BOX, below_low(draws, config.colours)), cell(WALL, GREY))
        cells = where((sides == 0) & (columns == 0), cell(BALL, self.first_cue)[:, None, None], cells)
        if config.recue_prob > 0:
            again = (sides == 0) & (columns == self.middle[:, None, None]) & self.recued[:, None, None]
            cells = where(again, cell(BALL, self.second_cue)[:, None, None], cells)
        door = inside & (slot < config.colours)
        return where(door, cell(DOOR, self._door_colours(slot), CLOSED), cells)

    def _door_colours(self, slot: Array) -> Array:
        """Colour of the door in each slot; slots beyond the doors give any colour."""
        if not self.config.shuffled:
            return slot
        colour = slot * 0
        for k in range(self.config.colours):
            colour = self.arrays.where(slot == self.slot_of[:, k, None, None], k, colour)
        return colour

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
