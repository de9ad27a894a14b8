"""A learner's folder: files of steps, progress, and the page that shows it."""
