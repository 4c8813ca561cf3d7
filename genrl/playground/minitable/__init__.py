"""MiniTable: a vectorised, language-conditioned table-top task with pictures, in numpy alone.

512 tables in chunks of 4 take about 2,000,000 steps per CPU-second from states, and 300,000 with a picture of 32 pixels
per decision (80,000 pictures; 23,000 of 64 pixels).
"""

from genrl.playground.minitable.env import MiniTable, render
from genrl.playground.minitable.task import (
    INSTRUCTIONS,
    PUT,
    TOUCH,
    Demonstrations,
    State,
    demonstrate,
    expert_chunk,
    task_numbers,
)

__all__ = [
    "INSTRUCTIONS",
    "PUT",
    "TOUCH",
    "Demonstrations",
    "MiniTable",
    "State",
    "demonstrate",
    "expert_chunk",
    "render",
    "task_numbers",
]
