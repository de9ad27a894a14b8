"""Where a vocabulary comes from: a module for each kind of file.

`files` reads all of them, with limits; `huggingface_rules` says what of a `tokenizer.json` is refused; `words` is one
with a vocabulary of words; `pipeline` is what the files of `meta` and `gguf` do not say of how a text is cut.

What is malformed, too large or not supported raises `TokenizerError`, which names the file, the place, what was found
and what is expected. A file that cannot be written raises `OutputError`.
"""
