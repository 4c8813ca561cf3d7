"""Dynamic-TreeRPO."""
