"""The room where a learner's own functions are checked."""
