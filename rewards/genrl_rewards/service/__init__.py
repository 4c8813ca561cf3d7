"""Rewards in other processes: serving, remote use, isolation."""
