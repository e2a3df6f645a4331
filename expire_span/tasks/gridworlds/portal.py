"""Portal: a chain of rooms, two coloured doors in each; the right one leads on, the wrong one back to the first room.

Which colour is right in a room is hidden and stays the same for the whole episode; where the two colours hang is drawn for each
room. A room is `width` x 2 cells: the agent enters at the middle of the lower row, the doors are above the two ends of the
upper row. With `marked` a box in the lower wall shows the room's number by colour and state.

Actions: left, right, up, down. Reward: +0.1 for every new farthest room, +1 for leaving the last one. With `laps` the chain is
passed several times. The expert tries red first where it does not know a room, and never errs where it does.
"""

from __future__ import annotations

from expire_span.task_configs import PortalTask

from .arrays import Array
from .engine import BOX, CLOSED, COLOURS, DOOR, DOWN, EMPTY, GREY, LEFT, RIGHT, UNSEEN, UP, WALL, Engine, cell

RIGHT_COLOUR, LAYOUT = range(2)
"""Purposes of draws."""
DOOR_COLOURS = (0, 2)
"""MiniGrid's red and blue; inside the engine they are 0 and 1."""
HEIGHT = 2


class Portal(Engine):
    name = "portal"
    num_actions = 4
    config: PortalTask

    def _begin(self, rows: Array) -> None:
        arrays, config = self.arrays, self.config
        where = arrays.where
        if not hasattr(self, "room"):
            self.room, self.lap, self.farthest, self.x, self.y = (arrays.zeros(self.num_envs) for _ in range(5))
            self.known = arrays.falses(self.num_envs, config.rooms)
            self.numbers = arrays.arange(config.rooms)[None, :]
            self.places = self.numbers + self.rows[:, None] * 0  # [B, N]
        self.right = (self.draw(RIGHT_COLOUR, self.places) >> 40) & 1  # [B, N]: 0 red, 1 blue
        self.left_colour = (self.draw(LAYOUT, self.places) >> 40) & 1  # [B, N]: colour of the left door
        self.room, self.lap = where(rows, 0, self.room), where(rows, 0, self.lap)
        self.farthest = where(rows, 0, self.farthest)
        self.known = self.known & ~rows[:, None]
        self._enter(rows)

    def _enter(self, rows: Array) -> None:
        """Put the agents of some rows at the entrance of their room."""
        where = self.arrays.where
        self.x, self.y = where(rows, self.config.width // 2, self.x), where(rows, HEIGHT - 1, self.y)

    def _advance(self, actions: Array, running: Array) -> tuple[Array, Array, Array]:
        where, config = self.arrays.where, self.config
        opened = running & (actions == UP) & self._beneath_door()
        here = (self.rows, self.room)
        right = opened & (self._colour_above() == self.right[here])
        self.known = self.known | (opened[:, None] & (self.numbers == self.room[:, None]))
        self._walk(actions, running & ~opened)
        after = where(right, self.room + 1, 0)
        passed = right & (after == config.rooms)
        self.lap = self.lap + passed
        done = passed & (self.lap == config.laps)
        self.room = where(opened, where(after == config.rooms, 0, after), self.room)
        progress = self.lap * config.rooms + self.room
        new = opened & ~done & (progress > self.farthest)
        self.farthest = where(new, progress, self.farthest)
        self._enter(opened)
        return where(done, 1.0, where(new, 0.1, 0.0)), done, done

    def _walk(self, actions: Array, rows: Array) -> None:
        where, last = self.arrays.where, self.config.width - 1
        x = (self.x + where(actions == RIGHT, 1, where(actions == LEFT, -1, 0))).clip(0, last)
        y = (self.y + where(actions == DOWN, 1, where(actions == UP, -1, 0))).clip(0, HEIGHT - 1)
        self.x, self.y = where(rows, x, self.x), where(rows, y, self.y)

    def _beneath_door(self) -> Array:
        return (self.y == 0) & ((self.x == 0) | (self.x == self.config.width - 1))

    def _colour_above(self) -> Array:
        """Colour of the left door for agents in the left half, else of the right one."""
        left = self.left_colour[self.rows, self.room]
        return self.arrays.where(self.x == 0, left, 1 - left)

    def _limits(self) -> int:
        return self.config.max_steps

    def observe(self) -> dict[str, Array]:
        where, width = self.arrays.where, self.config.width
        x = self.x[:, None, None] + self.offsets[:, None, :]  # [B, 1, V]
        y = self.y[:, None, None] + self.offsets[:, :, None]  # [B, V, 1]
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < HEIGHT)
        near = (x >= -1) & (x <= width) & (y >= -1) & (y <= HEIGHT)
        door = (y == -1) & ((x == 0) | (x == width - 1))
        left = self.left_colour[self.rows, self.room][:, None, None]
        marker = (y == HEIGHT) & (x == width // 2) & self.config.marked
        room = self.room[:, None, None]
        door_cell = where(where(x == 0, left, 1 - left) == 0, *(cell(DOOR, c, CLOSED) for c in DOOR_COLOURS))
        marker_cell = cell(BOX, room % len(COLOURS), room // len(COLOURS))
        wall = where(near, cell(WALL, GREY), UNSEEN)
        return {"image": self.paint(where(inside, EMPTY, where(door, door_cell, where(marker, marker_cell, wall))))}

    # The expert

    def _chosen_column(self) -> Array:
        """Column of the door that the expert takes in the present room."""
        where, here = self.arrays.where, (self.rows, self.room)
        colour = where(self.known[here], self.right[here], 0)
        return where(self.left_colour[here] == colour, 0, self.config.width - 1)

    def optimal_action(self) -> Array:
        where, column = self.arrays.where, self._chosen_column()
        return where(self.x < column, RIGHT, where(self.x > column, LEFT, UP))

    def oracle_steps(self) -> Array:
        config = self.config
        returns = (self.right * (self.numbers + 1)).sum(-1)
        return config.steps_per_room * (config.rooms * config.laps + returns)

    def _remaining(self) -> tuple[Array, Array]:
        """Steps that the expert still needs, and whether it will be sent back to the first room or do another lap."""
        config = self.config
        errs = ~self.known & (self.right == 1)  # [B, N]: rooms where the expert will try red in vain
        returns = (errs * (self.numbers + 1)).sum(-1)
        here = abs(self.x - self._chosen_column()) + self.y + 1
        laps = config.laps - 1 - self.lap
        rooms = config.rooms - 1 - self.room + config.rooms * laps + returns
        return here + config.steps_per_room * rooms, (returns + laps) > 0

    def needed(self) -> tuple[Array, Array]:
        """A room's fact is shown beneath the door that the expert takes: colour above, room below, and what comes next."""
        remaining, again = self._remaining()
        shown = again & self._beneath_door() & (self.x == self._chosen_column())
        until = self.steps + remaining - self.config.steps_per_room * (self.config.rooms - self.room)
        return self.arrays.where(shown, self.room, -1), until

    def describe_hidden(self, row: int) -> str:
        room = int(self.room[row])
        right = COLOURS[DOOR_COLOURS[int(self.right[row, room])]]
        return f"room {room + 1} of {self.config.rooms}, lap {int(self.lap[row]) + 1}, the {right} door is right"
