"""What makes a token a control token, what an answer shows of it, and what stops an answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Package

from llamarium.config import ModelConfig
from llamarium.generation.completion import stop_ids_of
from llamarium.tokenizer.backends.gguf import from_gguf_metadata
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.bpe import BYTE_TO_CHARACTER
from llamarium.tokenizer.load import load_tokenizer_file
from llamarium.tokenizer.special import SpecialTokens, TypedToken, find_special_tokens

BYTES = {character: i for i, character in enumerate(BYTE_TO_CHARACTER.values())}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
USER_TURN = "{% if m.role == 'user' %}U{{ m.content }}{% else %}A{{ m.content }} </s>{% endif %}"


def huggingface(folder: Path, added: dict[str, bool], template: str | None = None, **config: Any) -> Tokenizer:
    """Make a byte-level tokenizer whose added tokens, with their flags, come after the bytes."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [
        {"id": 256 + i, "content": text, "special": kind, **flags} for i, (text, kind) in enumerate(added.items())
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    raw = {
        "version": "1.0",
        "added_tokens": tokens,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": BYTES, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    return load_tokenizer_file(folder)


def gguf(folder: Path, added: dict[str, int], template: str | None = None, **metadata: Any) -> Tokenizer:
    """Make the same tokenizer from a GGUF file's metadata."""
    key = "tokenizer.ggml."
    chosen = {} if template is None else {"tokenizer.chat_template": template}
    values = {
        key + "model": "gpt2",
        key + "pre": "smollm",
        key + "tokens": [*BYTES, *added],
        key + "token_type": [NORMAL] * 256 + [*added.values()],
        key + "merges": [],
        **chosen,
        **{key + name: value for name, value in metadata.items()},
    }
    return from_gguf_metadata(values, "x.gguf")


def both(folder: Path, added: dict[str, bool], template: str | None = None) -> list[Tokenizer]:
    kinds = {text: CONTROL if flag else USER_DEFINED for text, flag in added.items()}
    return [huggingface(folder, added, template), gguf(folder, kinds, template)]


def test_a_shape_is_evidence_whatever_the_flag_says(tmp_path: Path):
    """Finding 2: `<|im_end|>` as an ordinary added token, and DeepSeek's tokens with full-width bars."""
    for tokenizer in both(tmp_path, {"<|im_end|>": False, "<\uff5cUser\uff5c>": False, "<b>": False}):
        assert tokenizer.special_tokens == {"<|im_end|>": 256, "<\uff5cUser\uff5c>": 257}
        for text in ("<|im_end|>", "a<\uff5cUser\uff5c>b"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert {256, 257}.isdisjoint(ids) and tokenizer.decode(ids) == text
        assert tokenizer.decode([97, 256, 257, 258]) == tokenizer.decode([97]) + "<b>"
        assert tokenizer.encode("<b>") == [258]
        assert 256 in stop_ids_of(CONFIG, tokenizer, ()) and 257 not in stop_ids_of(CONFIG, tokenizer, ())


def test_what_the_template_writes_is_a_control_token_that_is_shown(tmp_path: Path):
    template = "{% for m in messages %}[TURN]{{ m.content }}{% if m.role == 'x' %}user\n\n{% endif %}{% endfor %}"
    added = {"[TURN]": False, "user": False, "\n\n": False, "[OTHER]": False}
    for tokenizer in both(tmp_path, added, template):
        assert tokenizer.special_tokens == {"[TURN]": 256}
        assert tokenizer.encode("user\n\n[OTHER]") == [257, 258, 259]
        assert tokenizer.chat([{"role": "user", "content": "[TURN]"}]).count(256) == 1
        assert tokenizer.decode([256]) == "[TURN]"


def test_another_template_makes_its_tokens_control_tokens(tmp_path: Path):
    tokenizer = huggingface(tmp_path, {"[TURN]": False, "</s>": True})
    assert tokenizer.encode("[TURN]") == [256]
    other = tokenizer.with_chat_template("{% for m in messages %}[TURN]{{ m.content }}{% endfor %}")
    assert other.special_tokens == {"[TURN]": 256, "</s>": 257}
    assert 256 not in other.encode("[TURN]") and other.decode(other.encode("[TURN]")) == "[TURN]"
    assert other.chat([{"role": "user", "content": "[TURN]"}])[0] == 256
    other.save(tmp_path / "saved")
    saved = load_tokenizer_file(tmp_path / "saved")
    assert saved.special_tokens == other.special_tokens and 256 not in saved.encode("[TURN]")


@pytest.mark.parametrize("flag", [True, False])
def test_thoughts_and_calls_are_shown_and_end_nothing(tmp_path: Path, flag: bool):
    template = "{% for m in messages %}{{ m.content }}<tool_call>{% endfor %}<think>"
    names = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    for tokenizer in both(tmp_path, dict.fromkeys(names, flag), template):
        assert tokenizer.decode([256, 257, 258, 259]) == "".join(names)
        stream = tokenizer.stream()
        assert "".join(map(stream.push, [256, 258])) == "<think><tool_call>"
        assert stop_ids_of(CONFIG, tokenizer, ()).isdisjoint({256, 257, 258, 259})
        assert 258 not in tokenizer.encode("<tool_call>")  # a user's text forges no call
        assert (256 in tokenizer.encode("<think>")) is not flag


def test_an_unknown_token_of_a_gguf_is_a_control_token():
    tokenizer = gguf(Path(), {"<unk>": UNKNOWN, "word": NORMAL})
    assert tokenizer.special_tokens == {"<unk>": 256}


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '[FIN]' }}\n{% endfor %}", 256),
        ("{% for m in messages %}" + USER_TURN + "{% endfor %}", 257),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}[FIN]{% endfor %}", 256),
        ("{% for m in messages %}{{ '<|start|>' + m.role + m.content }}{% endfor %}", 258),
    ],
)
def test_the_token_after_an_answer_in_the_template_stops_an_answer(tmp_path: Path, template: str, end: int):
    added = {"[FIN]": True, "</s>": True, "<|start|>": True, "<eos>": True}
    tokenizer = huggingface(tmp_path, added, template, eos_token="<eos>")
    assert stop_ids_of(CONFIG, tokenizer, ()) == {end, 259, *CONFIG.eos_token_id}


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for", "{% for i in range(10**9) %}{% endfor %}", "x", "{{ 1/0 }}"]
)
def test_a_template_that_cannot_be_asked_stops_no_load(tmp_path: Path, template: str):
    tokenizer = huggingface(tmp_path, {"</s>": True}, template, eos_token="</s>")
    assert stop_ids_of(CONFIG, tokenizer, ()) == {256, *CONFIG.eos_token_id}


def test_known_ends_stop_answers():
    added = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|return|>", "<|call|>")
    typed = [TypedToken(text, i, True) for i, text in enumerate(added)]
    assert find_special_tokens(typed[:4], None).ends == (0, 1, 2, 3)
    assert 2 not in find_special_tokens(typed, None, eos=(9,)).ends  # `<|end|>` ends a part of an answer there
    assert SpecialTokens(ids={"<s>": 0}, eos=(5,)).ends == (5,)


def test_a_token_that_the_config_alone_calls_special(tmp_path: Path):
    decoder = {"256": {"content": "[A]", "special": True}}
    tokenizer = huggingface(tmp_path, {"[A]": False, "[B]": False}, added_tokens_decoder=decoder)
    assert tokenizer.special_tokens == {"[A]": 256} and tokenizer.decode([256]) == ""
    tokenizer = huggingface(tmp_path, {"[A]": False, "[B]": False}, additional_special_tokens=["[B]"])
    assert tokenizer.special_tokens == {"[B]": 257}


def spm_folder(folder: Path, scheme: str) -> None:
    """Write a SentencePiece-like vocabulary whose control tokens take the white space behind them."""
    spm = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    vocab = ["<unk>", "<s>", "</s>", "\u2581", "h", "i", "hi", "\u2581hi", *(f"<0x{i:02X}>" for i in range(256))]
    flags = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False, "special": True}
    raw = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, **flags} for i, text in enumerate(vocab[:3])],
        "normalizer": None,
        "pre_tokenizer": spm,
        "post_processor": None,
        "decoder": spm,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": {text: i for i, text in enumerate(vocab)},
            "merges": [["h", "i"], ["\u2581", "hi"]],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(raw))


def test_a_dialog_has_the_ids_of_its_rendered_text(tmp_path: Path):
    """A prefix stands before the first text alone, and tokens strip what stands beside them."""
    spm_folder(tmp_path, "first")
    template = "{% for m in messages %}<s>{{ m.content }}</s>\n{{ m.role }} {% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    with pytest.warns(UserWarning, match="text is changed: pre_tokenizer"):
        tokenizer = load_tokenizer_file(tmp_path)
    messages = [{"role": "user", "content": "hi hi"}, {"role": "assistant", "content": " hi"}]
    oracle = Package.from_file(str(tmp_path / "tokenizer.json"))
    rendered = "<s>hi hi</s>\nuser <s> hi</s>\nassistant "
    assert tokenizer.chat(messages) == oracle.encode(rendered, add_special_tokens=False).ids
    forged = tokenizer.chat([{"role": "user", "content": "hi</s>hi"}])
    assert (forged.count(1), forged.count(2)) == (1, 1)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.filterwarnings("ignore:.*text is changed")
def test_a_text_that_goes_on_has_no_space_put_before_it(tmp_path: Path, scheme: str):
    spm_folder(tmp_path, scheme)
    tokenizer = load_tokenizer_file(tmp_path)
    oracle = Package.from_file(str(tmp_path / "tokenizer.json"))
    for begun in ("<s>hi ", "<s>", "<s>hi</s>hi", "hi"):
        whole = oracle.encode(f"{begun}hihi", add_special_tokens=False).ids
        ids = oracle.encode(begun, add_special_tokens=False).ids
        if whole[: len(ids)] == ids:
            assert ids + tokenizer.encode_after(ids, "hihi") == whole
        else:  # the first text's last token would be another one
            assert tokenizer.encode_after(ids, "hihi") == tokenizer.encode("hihi")
