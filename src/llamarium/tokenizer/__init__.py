"""Text to token ids and back.

`base.Tokenizer` is the one class that callers hold. Where its vocabulary comes from is a backend's matter: Hugging
Face's `tokenizer.json` (`hf`), Meta's `tokenizer.model` (`meta`), a GGUF file (`gguf_vocab`) or the characters of a
text (`characters`). `bpe` is the readable byte-pair encoding that shows each merge; `streaming` and `stops` turn ids
into text that can be shown at once; `chat` and `template` lay out dialogs as ids.

Nothing here imports torch, and the libraries behind a backend are imported when that backend is used.
"""
