"""One sentence for each of Meta-World's tasks, which has none of its own."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

INSTRUCTIONS = {
    "assembly-v3": "put the ring of the wrench over the peg",
    "basketball-v3": "drop the ball into the basket",
    "bin-picking-v3": "move the cube from one bin to the other",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "press the button behind the wall from above",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "press the button behind the wall",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "lift the ring of the wrench off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "hand-insert-v3": "put the hand into the hole",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-open-v3": "open the faucet",
    "faucet-close-v3": "close the faucet",
    "hammer-v3": "drive the nail in with the hammer",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "push the peg into the hole from the side",
    "pick-place-wall-v3": "lift the puck over the wall to the goal",
    "pick-out-of-hole-v3": "lift the puck out of the hole",
    "reach-v3": "move the hand to the goal",
    "push-back-v3": "push the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "pick-place-v3": "lift the puck to the goal",
    "plate-slide-v3": "slide the plate into the net",
    "plate-slide-side-v3": "slide the plate sideways into the net",
    "plate-slide-back-v3": "slide the plate back out of the net",
    "plate-slide-back-side-v3": "slide the plate back sideways out of the net",
    "peg-unplug-side-v3": "pull the plug out sideways",
    "soccer-v3": "push the ball into the net",
    "stick-push-v3": "push the box with the stick",
    "stick-pull-v3": "pull the box with the stick",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-wall-v3": "move the hand around the wall to the goal",
    "shelf-place-v3": "put the puck on the shelf",
    "sweep-into-v3": "sweep the puck into the hole",
    "sweep-v3": "sweep the box off the table",
    "window-open-v3": "open the window",
    "window-close-v3": "close the window",
}
MAX_STEPS = 500
"""Meta-World's own limit."""


def checked(tasks: Sequence[str]) -> tuple[str, ...]:
    """The tasks, all fifty where there are none. Raises ValueError for an unknown one, with the nearest."""
    for name in tasks:
        if name not in INSTRUCTIONS:
            near = difflib.get_close_matches(name, INSTRUCTIONS, n=1, cutoff=0.3)
            raise ValueError(f"Meta-World has no task {name!r}; the nearest is {near[0] if near else 'reach-v3'!r}")
    return tuple(tasks) or tuple(INSTRUCTIONS)
