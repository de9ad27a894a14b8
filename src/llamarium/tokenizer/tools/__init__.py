"""Tools as text: how they are described to a model, and how its calls are read.

A model never calls anything. The dialog describes the functions, and the model writes a call as text; the program that
asked runs the function and puts the result into the next dialog. Three ways of writing are known (`forms`): the JSON of
Llama 3.1, the list of Python calls of Llama 3.2, and the `<tool_call>` blocks of Hermes in ChatML.

`definition` has the objects, as OpenAI's API has them; `request` is what one request says about tools. `forms` writes
them into dialogs, `parser` reads calls out of answers while they come, and `grammar` holds an answer to calls.

What does not fit raises `ToolError`, with the path of the field. It is independent of models, files and HTTP.
"""
