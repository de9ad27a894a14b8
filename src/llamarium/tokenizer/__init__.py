"""Text to token ids and back.

`base.Tokenizer` is the one class that callers hold. Where its vocabulary comes from is a backend's matter: those are in
`backends`. `bpe` is the readable byte-pair encoding that shows each merge; `pieces` encodes texts of any length;
`streaming` and `stops` turn ids into text that can be shown at once; `chat` lays out dialogs as ids; `tools` writes
and reads calls of functions.

Nothing here imports torch, and the libraries behind a backend are imported when that backend is used.
"""
