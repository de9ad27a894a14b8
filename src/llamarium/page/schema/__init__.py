"""What the page asks, and what it gets: the one schema of both. `python -m llamarium.page.schema` prints it.

`web/src/schema.json` is what this prints, and `web/src/schema.ts` is made of that; tests fail where they differ.
Numbers in bulk are no JSON: they travel as `page/binary.py` says.
"""
