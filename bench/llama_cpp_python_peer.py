"""One token by llama-cpp-python, for `startup.py`: python bench/llama_cpp_python_peer.py FILE.gguf."""

import sys

import llama_cpp

llama = llama_cpp.Llama(sys.argv[1], n_ctx=512, n_threads=2, verbose=False)
for piece in llama.create_completion("Once upon a time", max_tokens=1, temperature=0, stream=True):
    print(piece["choices"][0]["text"], end="", flush=True)
