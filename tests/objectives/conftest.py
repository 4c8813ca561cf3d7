"""Property tests draw the same examples in every run and are not timed: a loaded machine must not fail them."""

from hypothesis import settings

settings.register_profile("reproducible", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("reproducible")
