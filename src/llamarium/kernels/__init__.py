"""Fast versions of plain functions; each is held to its readable reference by the tests."""
