"""Reading of JSON schemas: from what libraries write to keywords that a grammar enforces.

`reading.py` walks a schema once; the other modules each know one thing about it. `..json_schema` is the way in.
"""
