"""A translator from English to French, small enough to look into: it makes its sentences, learns, and says how well.

The sentences follow a small grammar in which word order differs between the two languages ("the black cat" is "le chat
noir", "do not" goes around the verb), and in which a word of one language depends on several of the other ("the" is
le, la, l' or les). The model is the encoder-decoder of `encoder_decoder.py`, with words as tokens. What it learns is
written as a folder that the page's stage "Encoder and decoder" reads (`llamarium.inspect.probes.translation`).

    python examples/english_french.py --out src/llamarium/models/english-french
    python examples/english_french.py --pairs 10    # prints sentences, and learns nothing
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from encoder_decoder import EncoderDecoder, train
from torch import Tensor, nn

from llamarium.checkpoints.huggingface.writer import OutputTensor, write_safetensors
from llamarium.config import ModelConfig

# --- the grammar ------------------------------------------------------------------------------------------------------

NOUNS = {  # one and many in English; one, many and gender in French
    "cat": ("cats", "chat", "chats", "m"), "dog": ("dogs", "chien", "chiens", "m"),
    "horse": ("horses", "cheval", "chevaux", "m"), "bird": ("birds", "oiseau", "oiseaux", "m"),
    "cow": ("cows", "vache", "vaches", "f"), "book": ("books", "livre", "livres", "m"),
    "house": ("houses", "maison", "maisons", "f"), "flower": ("flowers", "fleur", "fleurs", "f"),
    "letter": ("letters", "lettre", "lettres", "f"), "car": ("cars", "voiture", "voitures", "f"),
    "apple": ("apples", "pomme", "pommes", "f"), "friend": ("friends", "ami", "amis", "m"),
    "tree": ("trees", "arbre", "arbres", "m"), "song": ("songs", "chanson", "chansons", "f"),
}  # fmt: skip
LIVING = ("cat", "dog", "horse", "bird", "cow", "friend")
PERSONS = ("I", "you", "he", "she", "we", "they")
PRONOUNS = ("je", "vous", "il", "elle", "nous", "ils")
VERBS = {  # without and with -s in English; by person in French
    "love": ("loves", "aime", "aimez", "aime", "aime", "aimons", "aiment"),
    "admire": ("admires", "admire", "admirez", "admire", "admire", "admirons", "admirent"),
    "see": ("sees", "vois", "voyez", "voit", "voit", "voyons", "voient"),
    "find": ("finds", "trouve", "trouvez", "trouve", "trouve", "trouvons", "trouvent"),
    "watch": ("watches", "regarde", "regardez", "regarde", "regarde", "regardons", "regardent"),
    "draw": ("draws", "dessine", "dessinez", "dessine", "dessine", "dessinons", "dessinent"),
    "buy": ("buys", "achète", "achetez", "achète", "achète", "achetons", "achètent"),
}
IN_GENERAL = ("love", "admire")  # of all dogs, "les chiens"; one sees some of them, "des chiens"
ADJECTIVES = {  # one and many, of either gender; whether it stands before the noun
    "black": ("noir", "noirs", "noire", "noires", False), "white": ("blanc", "blancs", "blanche", "blanches", False),
    "red": ("rouge", "rouges", "rouge", "rouges", False), "green": ("vert", "verts", "verte", "vertes", False),
    "small": ("petit", "petits", "petite", "petites", True), "big": ("grand", "grands", "grande", "grandes", True),
}  # fmt: skip
DETERMINERS = {  # one of either gender, many
    "the": ("le", "la", "les"), "a": ("un", "une", ""), "my": ("mon", "ma", "mes"), "this": ("ce", "cette", ""),
    "these": ("", "", "ces"), "": ("", "", "des"),
}  # fmt: skip
VOWELS = tuple("aeiou")
Rule = dict[str, str]
BEFORE_A_VOWEL: Rule = {"le": "l'", "la": "l'", "je": "j'", "ne": "n'", "de": "d'", "ma": "mon", "ce": "cet"}


def noun_phrase(draw: random.Random, *, subject: bool, verb: str = "", negated: bool = False) -> tuple[str, str, bool]:
    """Return a noun with what belongs to it in both languages, and whether it is many."""
    noun, is_many = draw.choice(LIVING if subject else [*NOUNS]), draw.random() < 0.4
    fits = ("the", "my", "these") if is_many else ("the", "a", "my", "this")
    determiner = "" if is_many and not subject and draw.random() < 0.6 else draw.choice(fits)
    many, french_one, french_many, gender = NOUNS[noun]
    of_gender, of_both = gender == "f", 2 * (gender == "f") + is_many
    french = [french_many if is_many else french_one]
    article = DETERMINERS[determiner][2 if is_many else of_gender]
    english = [many if is_many else noun]
    is_first = False
    if draw.random() < 0.4:
        adjective = draw.choice([*ADJECTIVES])
        is_first = bool(ADJECTIVES[adjective][4])
        french.insert(0 if is_first else 1, str(ADJECTIVES[adjective][of_both]))
        english.insert(0, adjective)
    if article in ("des", "un", "une"):
        if article == "des" and verb in IN_GENERAL:
            article = "les"
        elif (negated and verb not in IN_GENERAL) or (article == "des" and is_first):
            article = "de"
    if determiner == "a" and english[0].startswith(VOWELS):
        determiner = "an"
    return " ".join([determiner, *english]).strip(), " ".join([article, *french]), is_many


def sentence(draw: random.Random) -> tuple[str, str]:
    """Return a sentence in English and in French, words apart."""
    if draw.random() < 0.6:
        person = draw.randrange(6)
        english, french = PERSONS[person], PRONOUNS[person]
    else:
        english, french, is_many = noun_phrase(draw, subject=True)
        person = 5 if is_many else 2
    verb, negated, often = draw.choice([*VERBS]), draw.random() < 0.25, draw.random() < 0.15
    third = person in (2, 3)
    spoken = ["does" if third else "do", "not", verb] if negated else [VERBS[verb][0] if third else verb]
    if often:
        spoken.insert(len(spoken) - 1, "often")
    said = [VERBS[verb][1 + person]]
    if negated:
        said = ["ne", *said, "pas"]
    if often:
        said.append("souvent")
    what, quoi, _ = noun_phrase(draw, subject=False, verb=verb, negated=negated)
    return " ".join([english, *spoken, what]), elided(" ".join([french, *said, quoi]))


def elided(text: str) -> str:
    """Return French with l', j', n', d' where a vowel follows; "mon amie" and "cet arbre" too."""
    words = text.split()
    return " ".join(
        BEFORE_A_VOWEL.get(word, word) if after.startswith(VOWELS) else word
        for word, after in zip(words, [*words[1:], ""], strict=True)
    )


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return so many different pairs, always the same."""
    draw, found = random.Random(seed), dict[str, str]()
    while len(found) < count:
        english, french = sentence(draw)
        found.setdefault(english, french)
    return [*found.items()]


# --- learning ---------------------------------------------------------------------------------------------------------

PAD, BEGIN, END = "·", "▷", "□"


def vocabulary(data: list[tuple[str, str]]) -> list[str]:
    """Return every word of both languages, behind padding, begin and end."""
    return [PAD, BEGIN, END, *sorted({word for pair in data for text in pair for word in text.split()})]


class Translator:
    """The model with its words."""

    def __init__(self, words: list[str], hidden_size: int) -> None:
        self.words, self.ids = words, {word: i for i, word in enumerate(words)}
        self.config = ModelConfig(
            vocab_size=len(words), hidden_size=hidden_size, intermediate_size=2 * hidden_size,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=hidden_size // 4,
            rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=32, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = EncoderDecoder(self.config)

    def encode(self, texts: list[str]) -> Tensor:
        """Return ids (B, T), padded on the right to the longest text."""
        rows = [[self.ids[word] for word in text.split()] for text in texts]
        width = max(map(len, rows))
        return torch.tensor([row + [0] * (width - len(row)) for row in rows])

    def loss(self, model: EncoderDecoder, chosen: list[tuple[str, str]]) -> Tensor:
        """Return the mean of -log P over the words of the French sentences."""
        target_BT = self.encode([f"{BEGIN} {french} {END}" for _, french in chosen])
        source = model.read(self.encode([f"{english} {END}" for english, _ in chosen]))
        logits_BTV = model.write(target_BT[:, :-1], source)
        return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT[:, 1:].flatten(), ignore_index=0)

    @torch.no_grad()
    def translate(self, texts: list[str], longest: int = 20) -> list[str]:
        """Write the most probable words, one after another."""
        source = self.model.read(self.encode([f"{text} {END}" for text in texts]))
        target_BT = torch.full((len(texts), 1), self.ids[BEGIN])
        for _ in range(longest):
            next_B1 = self.model.write(target_BT, source)[:, -1:].argmax(-1)
            target_BT = torch.cat((target_BT, next_B1), dim=1)
        written = (" ".join(self.words[i] for i in row) for row in target_BT[:, 1:].tolist())
        return [text.partition(END)[0].strip() for text in written]

    def halve(self) -> None:
        """Round the weights to float16, as they are stored."""
        self.model.load_state_dict({key: value.half() for key, value in self.model.state_dict().items()})

    def save(self, folder: Path, english: set[str], **about: int) -> None:
        """Write the weights in float16, the words, and how well it translates."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {key: value.half().numpy() for key, value in self.model.state_dict().items()}
        write_safetensors(folder / "model.safetensors", [output(key, values) for key, values in state.items()])
        shape = {name: getattr(self.config, name) for name in ("num_attention_heads", "rope_theta", "rms_norm_eps")}
        text = json.dumps({**shape, **about, "english": sorted(english), "words": self.words}, ensure_ascii=False)
        (folder / "translator.json").write_text(text + "\n", "utf-8")


def output(key: str, values: np.ndarray) -> OutputTensor:
    """Return a tensor as it is written."""
    return OutputTensor(key, values.shape, "F16", lambda: values)


def main() -> None:
    """Learn from most pairs, and be asked for the others."""
    parser = argparse.ArgumentParser(description="Learn to translate small sentences from English to French.")
    parser.add_argument("--out", type=Path, help="a folder for the model")
    parser.add_argument("--pairs", type=int, help="print so many sentences, and end")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--hidden-size", type=int, default=48)
    args = parser.parse_args()
    if args.pairs:
        print("\n".join(f"{english}  ->  {french}" for english, french in pairs(args.pairs)))
        return
    data = pairs(9000)
    learned, asked = data[:8000], data[8000:]
    torch.manual_seed(0)
    one = Translator(vocabulary(data), args.hidden_size)
    for parameter in one.model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.05)
    train(one.model, one.loss, learned, args.steps)
    one.halve()
    answers = one.translate([english for english, _ in asked])
    right = [found == french for found, (_, french) in zip(answers, asked, strict=True)]
    if args.out is not None:
        english = {word for text, _ in data for word in text.split()}
        one.save(args.out, english, learned=len(learned), asked=len(asked), right=sum(right), steps=args.steps)
    size = sum(p.numel() for p in one.model.parameters())
    print(f"{size:,} parameters, {len(one.words)} words: {sum(right)} of {len(asked)} new sentences are right")
    for (english, french), found in zip(asked, answers, strict=True):
        if found != french:
            print(f"    {english}  ->  {found}  (expected {french})")
    for text in ("I love dogs", "the black cat does not see the small house"):
        print(f"    {text}  ->  {one.translate([text])[0]}")


if __name__ == "__main__":
    main()
