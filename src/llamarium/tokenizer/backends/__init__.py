"""Tokenizer backends: a module for each file format.

`files` reads all of them, with limits; `huggingface_rules` validates a `tokenizer.json`; `words` is a word-level
vocabulary; `pipeline` has the pre-tokenizers that the files of `meta` and `gguf` do not contain.

Malformed, oversized and unsupported files raise `TokenizerError` with the file, the place, the value and the expected
one. A file that cannot be written raises `OutputError`.
"""
