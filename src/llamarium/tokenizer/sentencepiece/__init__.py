"""SentencePiece vocabularies: Llama 1 and 2, Mistral, TinyLlama and many others.

`wire` reads protobuf fields, `model` makes a vocabulary of them; `charsmap` and `normalize` turn a text into what is
segmented, `segment` finds its pieces. Every step gives what the `sentencepiece` library gives, which the tests use as
the oracle and nothing here imports.

Source: Kudo, Richardson 2018, "SentencePiece: A simple and language independent subword tokenizer and detokenizer for
Neural Text Processing"; google/sentencepiece, `sentencepiece_model.proto` and `src/`.
"""
