"""Losses and advantage estimators: pure functions of tensors."""
