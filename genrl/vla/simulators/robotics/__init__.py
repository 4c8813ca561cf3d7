"""gymnasium-robotics' Fetch and PointMaze and gymnasium's Reacher, with pictures that are cheap, instructions, and
scripted experts."""
