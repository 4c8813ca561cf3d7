"""Demonstrations, LeRobot data sets, videos."""
