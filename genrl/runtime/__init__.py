"""Run folder, checkpoints, trackers, progress and report: functions the trainers call."""
