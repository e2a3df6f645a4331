"""Portal: a chain of rooms, two coloured doors in each; the right one leads on, the wrong one back to the first room.

Which colour is right in a room is hidden and stays the same for the whole episode; where the two colours hang is drawn for each
room. A room is `width` x 2 cells: the agent enters at the middle of the lower row, the doors are above the two ends of the
upper row. With `marked` a box in the lower wall shows the room's number by colour and state.

Actions: left, right, up, down. Reward: +0.1 for every new farthest room, +1 for leaving the last one. With `laps` the chain is
passed several times. The expert tries red first where it does not know a room, and never errs where it does.
"""

from __future__ import annotations

from expire_span.settings.tasks import PortalTask
from expire_span.tasks.hashing import mix_signed

from .arrays import Array
from .engine import BOX, CLOSED, COLOURS, DOOR, EMPTY, GREY, LEFT, RIGHT, UNSEEN, UP, WALL, WorldEngine, cell

RIGHT_COLOUR, LAYOUT = range(2)
"""Purposes of draws."""
DOOR_COLOURS = (0, 2)
"""MiniGrid's red and blue; inside the engine they are 0 and 1."""
HEIGHT = 2


class Portal(WorldEngine):
    name = "portal"
    state = ("room", "lap", "farthest", "x", "y", "known")
    num_actions = 4
    config: PortalTask
    room: Array
    """[B]: number of the current room."""
    lap: Array
    """[B]: how often the chain has been passed."""
    farthest: Array
    """[B]: largest number of rooms passed so far, over all laps."""
    x: Array
    """[B]: the agent's column in its room."""
    y: Array
    """[B]: the agent's row, from the doors down."""
    known: Array
    """[B, N]: rooms in which a door has been opened."""
    right: Array
    """[B, N]: colour of the right door of each room, 0 red, 1 blue."""
    left_colour: Array
    """[B, N]: colour of the left door of each room."""

    def _build_tables(self) -> None:
        self.numbers = self.arrays.arange(self.config.rooms)[None, :]
        self.first_rooms = self.rows * self.config.rooms  # where a row's rooms begin in flat arrays
        self.changes_x = self.arrays.constant([-1, 1, 0, 0])  # how each action moves the agent
        self.changes_y = self.arrays.constant([0, 0, -1, 1])
        self.views = self._draw_views()

    def _draw_facts(self, keys: Array) -> dict[str, Array]:
        purposes = mix_signed(keys + self.arrays.arange(2)[:, None])  # [2, n]
        colours = (mix_signed(purposes[:, :, None] + self.numbers) >> 40) & 1  # [2, n, N]
        return {"right": colours[RIGHT_COLOUR], "left_colour": colours[LAYOUT]}

    def _first_state(self, facts: dict[str, Array]) -> dict[str, Array]:
        zero = facts["right"][:, 0] * 0
        x, y = zero + self.config.width // 2, zero + HEIGHT - 1
        return {"room": zero, "lap": zero, "farthest": zero, "x": x, "y": y, "known": facts["right"] < 0}

    def _here(self, of_rooms: Array) -> Array:
        """The entry of the present room, [B], in an array [B, N]."""
        return of_rooms.reshape(-1)[self.first_rooms + self.room]

    def _advance(self, actions: Array, running: Array) -> tuple[Array, Array, Array]:
        where, config = self.arrays.where, self.config
        opened = running & (actions == UP) & self._beneath_door()
        right = opened & (self._colour_above() == self._here(self.right))
        self.known = self.known | (opened[:, None] & (self.numbers == self.room[:, None]))
        x = self.arrays.clamp(self.x + self.changes_x[actions], config.width - 1)
        y = self.arrays.clamp(self.y + self.changes_y[actions], HEIGHT - 1)
        # An agent that goes through a door is placed at the entrance of the next room.
        self.x = where(opened, config.width // 2, where(running, x, self.x))
        self.y = where(opened, HEIGHT - 1, where(running, y, self.y))
        after = where(right, self.room + 1, 0)
        passed = right & (after == config.rooms)
        self.lap = self.lap + passed
        done = passed & (self.lap == config.laps)
        self.room = where(opened, where(passed, 0, after), self.room)
        progress = self.lap * config.rooms + self.room
        new = opened & ~done & (progress > self.farthest)
        self.farthest = where(new, progress, self.farthest)
        return where(done, 1.0, where(new, 0.1, 0.0)), done, done

    def _beneath_door(self) -> Array:
        return (self.y == 0) & ((self.x == 0) | (self.x == self.config.width - 1))

    def _colour_above(self) -> Array:
        """Colour of the left door for agents in the left half, else of the right one."""
        left = self._here(self.left_colour)
        return self.arrays.where(self.x == 0, left, 1 - left)

    def _limits(self) -> int:
        return self.config.max_steps

    def observe(self) -> dict[str, Array]:
        width, marker = self.config.width, self.room if self.config.marked else 0
        number = ((marker * 2 + self._here(self.left_colour)) * HEIGHT + self.y) * width + self.x
        return {"image": self.views[number]}

    def _draw_views(self) -> Array:
        """The view from every cell of every room with either layout of doors: [rooms * 2 * HEIGHT * width, V, V, 3]."""
        where, arange, width = self.arrays.where, self.arrays.arange, self.config.width
        rooms = self.config.rooms if self.config.marked else 1
        number = arange(rooms * 2 * HEIGHT * width)[:, None, None]
        x = number % width + self.offsets[:, None, :]  # [S, 1, V]
        y = number // width % HEIGHT + self.offsets[:, :, None]  # [S, V, 1]
        left, room = number // (HEIGHT * width) % 2, number // (2 * HEIGHT * width)
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < HEIGHT)
        near = (x >= -1) & (x <= width) & (y >= -1) & (y <= HEIGHT)
        door = (y == -1) & ((x == 0) | (x == width - 1))
        marker = (y == HEIGHT) & (x == width // 2) & self.config.marked
        door_cell = where(where(x == 0, left, 1 - left) == 0, *(cell(DOOR, c, CLOSED) for c in DOOR_COLOURS))
        marker_cell = cell(BOX, room % len(COLOURS), room // len(COLOURS))
        wall = where(near, cell(WALL, GREY), UNSEEN)
        return self.paint(where(inside, EMPTY, where(door, door_cell, where(marker, marker_cell, wall))))

    # The expert

    def _chosen_column(self) -> Array:
        """Column of the door that the expert takes in the present room."""
        where = self.arrays.where
        colour = where(self._here(self.known), self._here(self.right), 0)
        return where(self._here(self.left_colour) == colour, 0, self.config.width - 1)

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
        """A room's fact is shown at the step beneath the door that the expert takes: the view shows the door's colour and the
        room, and the step after it shows whether the door was right."""
        remaining, again = self._remaining()
        shown = again & self._beneath_door() & (self.x == self._chosen_column())
        until = self.steps + remaining - self.config.steps_per_room * (self.config.rooms - self.room)
        return self.arrays.where(shown, self.room, -1), until

    def describe_hidden(self, row: int) -> str:
        room = int(self.room[row])
        right = COLOURS[DOOR_COLOURS[int(self.right[row, room])]]
        return f"room {room + 1} of {self.config.rooms}, lap {int(self.lap[row]) + 1}, the {right} door is right"
