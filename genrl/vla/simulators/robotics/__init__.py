"""gymnasium-robotics' Fetch and PointMaze, with pictures that are cheap, instructions, and scripted experts."""
