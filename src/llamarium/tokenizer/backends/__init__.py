"""Where a vocabulary comes from.

| file | what it reads |
|---|---|
| `huggingface` | `tokenizer.json`; what in it is refused: `huggingface_rules` |
| `meta` | Meta's `tokenizer.model` |
| `gguf` | the metadata of a GGUF file |
| `characters` | `characters.json`, the characters of a text |
| `words` | `tokenizer.json` with a vocabulary of words |
| `pipeline` | for `meta` and `gguf`: what their files do not say of how a text is cut |
| `files` | for all of them: the files themselves, with limits |

What is malformed, too large or not supported raises `TokenizerError`, which names the file, the place, what was found
and what is expected. A file that cannot be written raises `OutputError`.
"""
