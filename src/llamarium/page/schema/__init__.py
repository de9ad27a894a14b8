"""The schema of the page's requests and responses. `python -m llamarium.page.schema` prints it.

`npm run schema` in web/ makes types of TypeScript from it in build/schema/, which git does not hold.
Numbers in bulk are no JSON: they travel as `page/binary.py` says.
"""
