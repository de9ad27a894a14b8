"""SentencePiece vocabularies: Llama 1 and 2, Mistral, TinyLlama and many others.

`wire` parses protobuf fields and `model` the vocabulary; `charsmap` and `normalize` normalize a text, and `segment`
splits it into pieces. Every step has the same result as the `sentencepiece` library, which only the tests use.

Source: Kudo, Richardson 2018, "SentencePiece: A simple and language independent subword tokenizer and detokenizer for
Neural Text Processing"; google/sentencepiece, `sentencepiece_model.proto` and `src/`.
"""
