"""Tests of genrl/runtime/compare."""
