"""What all tests share: one deterministic Hypothesis profile."""

import hypothesis

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, database=None)
hypothesis.settings.load_profile("ci")
