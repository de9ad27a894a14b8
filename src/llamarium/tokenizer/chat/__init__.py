"""Dialogs as ids.

A chat model was trained on dialogs with control tokens between the messages. Writing the whole dialog as one string
and encoding it with control tokens on would let a user write `<|eot_id|>` and speak as the system. Here control
tokens are put by id where the format says, and what people say is encoded with control tokens off.

Llama 3's format and ChatML are built in (`builtin`). A template that comes with a model and is neither runs in
`template`. `choose` finds which it is; `format` says what a format is.

A dialog that does not fit its format raises `ChatFormatError`; tools, calls and results that do not fit raise
`ToolError`. Both name the place.
"""
