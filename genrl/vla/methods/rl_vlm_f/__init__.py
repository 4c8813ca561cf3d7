"""RL-VLM-F on offline data."""
