"""A learner's folder."""
