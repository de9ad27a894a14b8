"""Where a vocabulary comes from: a module for each kind of file.

What is malformed, too large or not supported raises `TokenizerError`, which names the file, the place, what was found
and what is expected. A file that cannot be written raises `OutputError`.
"""
