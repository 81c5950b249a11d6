"""The steps of the sentiment analysis (docs/papers.md: A10), in the paper's order and under its names.

Each step takes a tweet or a sentence and returns what the next one takes. What the steps know of English comes from
three libraries that bring their data along: simplemma (languages, base forms), nltk (tokens of tweets) and TextBlob
(parts of speech, the polarity of words). Steps that load data are classes, of which each task makes one.

The result must be a function of the tweet alone, so that it does not matter which task takes which step.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from penstock.apps.sentiment.tweets import ATTRIBUTES, PRODUCTS, Tweet
from penstock.runtime.errors import FlowError

LANGUAGES = ("en", "de", "fr", "es")
_KNOWN_SHARE = 0.5  # of a tweet's words, that must be English

#: Expressions of several words, with their polarity. No word of them has it.
PHRASES: dict[tuple[str, ...], float] = {
    ("works", "like", "a", "charm"): 0.8,
    ("work", "like", "a", "charm"): 0.8,
    ("blew", "me", "away"): 0.9,
    ("waste", "of", "money"): -0.8,
    ("let", "me", "down"): -0.6,
    ("falls", "apart"): -0.7,
    ("must", "have"): 0.6,
}
_PHRASE = "PHRASE"  # their tag

_LINK = re.compile(r"https?://\S+")
_REPEATED = re.compile(r"^RT @\w+:\s*")
_ABBREVIATIONS = frozenset(("mr", "mrs", "ms", "dr", "vs", "etc", "e.g", "i.e", "approx", "no"))
_NEGATIONS = frozenset(("no", "not", "never", "without", "cannot"))
_CLAUSE = re.compile(r"^[.,;:!?]+$|^(?:but|although|though|while)$")
_NEGATED = -0.5  # what is left of a word's polarity behind a negation, as TextBlob has it
_CANONICAL = {word: name for name, words in ATTRIBUTES.items() for word in words}


class Token(NamedTuple):
    """A word of a sentence with the findings of the steps about it. `place`: its place in the sentence."""

    word: str
    place: int
    tag: str = ""  # the part of speech, as the Penn Treebank has it
    base: str = ""  # the base form
    clause: int = 0  # the number of the clause in the sentence
    negated: bool = False
    polarity: float = 0.0  # from -1 to 1
    attribute: str = ""  # its name, if it is one


class Sentence(NamedTuple):
    """A sentence of a tweet. It has a text until it has tokens."""

    tweet: int
    time_ms: int
    number: int
    text: str
    tokens: tuple[Token, ...] = ()

    def with_tokens(self, tokens: Iterable[Token]) -> Sentence:
        """Returns the sentence with these tokens."""
        return self._replace(tokens=tuple(tokens))


class Filter:
    """Passes tweets in English on, without links and the `RT @name:` prefix."""

    def __init__(self) -> None:
        from simplemma import LanguageDetector

        _known()
        self._detector = LanguageDetector(LANGUAGES)

    def __call__(self, tweet: Tweet) -> Iterator[Tweet]:
        number, time_ms, text = tweet
        text = _LINK.sub("", _REPEATED.sub("", html.unescape(text))).strip()
        shares = self._detector.proportion_in_each_language(text)
        if shares.get("en", 0.0) >= max(_KNOWN_SHARE, *shares.values()):
            yield number, time_ms, text


class Sentences:
    """Divides tweets into sentences."""

    def __init__(self) -> None:
        from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

        known = PunktParameters()
        known.abbrev_types = set(_ABBREVIATIONS)
        self._tokenizer = PunktSentenceTokenizer(known)

    def __call__(self, tweet: Tweet) -> Iterator[Sentence]:
        number, time_ms, text = tweet
        for place, sentence in enumerate(self._tokenizer.tokenize(text)):
            yield Sentence(number, time_ms, place, sentence)


class Tokenise:
    """Divides sentences into tokens: words, punctuation marks, hashtags, emojis. Names with @ are left out."""

    def __init__(self) -> None:
        from nltk.tokenize import TweetTokenizer

        self._tokenizer = TweetTokenizer(reduce_len=True, strip_handles=True)

    def __call__(self, sentence: Sentence) -> Sentence:
        words = self._tokenizer.tokenize(sentence.text)
        return sentence.with_tokens(Token(word, place) for place, word in enumerate(words))


class TagPartsOfSpeech:
    """Says of each token which part of speech it is."""

    def __init__(self) -> None:
        self._parser = _known().parser

    def __call__(self, sentence: Sentence) -> Sentence:
        tagged = self._parser.find_tags([token.word for token in sentence.tokens])
        pairs = zip(sentence.tokens, tagged, strict=True)
        return sentence.with_tokens(token._replace(tag=str(tag)) for token, (_, tag) in pairs)


def custom_nouns(sentence: Sentence) -> Sentence:
    """Makes the name of a product one token, and a noun of a hashtag."""
    tokens = _joined(sentence.tokens, _PRODUCTS, "NNP")
    return sentence.with_tokens(
        token._replace(word=token.word[1:], tag="NNP") if token.word[0] == "#" and len(token.word) > 1 else token
        for token in tokens
    )


def complex_phrases(sentence: Sentence) -> Sentence:
    """Makes an expression of several words one token."""
    return sentence.with_tokens(_joined(sentence.tokens, PHRASES, _PHRASE))


def negate(sentence: Sentence) -> Sentence:
    """Marks the tokens behind a negation, up to the end of the clause."""
    clause, negated, tokens = 0, False, []
    for token in sentence.tokens:
        word = token.word.lower()
        if _CLAUSE.match(word):
            clause, negated = clause + 1, False
        tokens.append(token._replace(clause=clause, negated=negated))
        negated = negated or _negates(word)
    return sentence.with_tokens(tokens)


class BaseForms:
    """Finds the base form of each token: battery of batteries, be of is."""

    def __init__(self) -> None:
        from simplemma import Lemmatizer

        self._lemmatizer = Lemmatizer()

    def __call__(self, sentence: Sentence) -> Sentence:
        lemma = self._lemmatizer.lemmatize
        return sentence.with_tokens(
            token._replace(base=lemma(token.word, "en").lower() if token.word.isalpha() else token.word.lower())
            for token in sentence.tokens
        )


class SentimentWords:
    """Finds the polarity of each token. A word of degree before it makes it stronger, a negation turns it round."""

    def __init__(self) -> None:
        self._words = _known().sentiment
        self._words.load()

    def __call__(self, sentence: Sentence) -> Sentence:
        tokens, degree = [], 1.0
        for token in sentence.tokens:
            polarity, stronger = self._of(token)
            if polarity:
                strength = max(-1.0, min(1.0, polarity * degree))
                polarity = round(strength * _NEGATED if token.negated else strength, 6)
            degree = stronger if token.tag.startswith("RB") else 1.0
            tokens.append(token._replace(polarity=polarity))
        return sentence.with_tokens(tokens)

    def _of(self, token: Token) -> tuple[float, float]:
        """Returns the polarity of a token, and how much stronger it makes the next one."""
        if token.tag == _PHRASE:
            return PHRASES[tuple(token.word.lower().split())], 1.0
        if token.tag == "NNP" or _negates(token.word.lower()):  # a name says nothing, whatever it means
            return 0.0, 1.0
        senses = dict.get(self._words, token.word.lower()) or dict.get(self._words, token.base)
        if senses is None:
            return 0.0, 1.0
        kind = token.tag[:2]
        if kind == "NN" and kind not in senses:  # a sound is no sound judgement
            return 0.0, 1.0
        polarity, _, intensity = senses.get(kind) or senses[None]
        # Words of degree, such as "very", have a polarity of their own in the data, which is that of what follows.
        return (0.0 if token.tag.startswith("RB") else float(polarity)), float(intensity)


def attributes(sentence: Sentence) -> Sentence:
    """Finds the tokens that name an attribute: nouns that are no names, and neither praise nor blame."""
    return sentence.with_tokens(
        token._replace(attribute=token.base)
        if token.tag in {"NN", "NNS"} and not token.polarity and token.word.isalpha()
        else token
        for token in sentence.tokens
    )


def normalise(sentence: Sentence) -> Sentence:
    """Gives an attribute the name that all its words have in common: "screen" is that of a display too."""
    return sentence.with_tokens(
        token._replace(attribute=_CANONICAL.get(token.attribute, token.attribute)) if token.attribute else token
        for token in sentence.tokens
    )


def stop_words(sentence: Sentence) -> Sentence:
    """Drops the tokens that are neither an attribute nor praise nor blame."""
    return sentence.with_tokens(token for token in sentence.tokens if token.attribute or token.polarity)


def analyse(sentence: Sentence) -> Iterator[dict[str, Any]]:
    """Yields an opinion for each attribute: it is as good as the nearest token with a polarity, in its own clause if
    there is one."""
    said = [token for token in sentence.tokens if token.polarity]
    if not said:
        return
    for token in sentence.tokens:
        if token.attribute:
            near = _nearest(token, said)
            yield {
                "tweet": sentence.tweet,
                "time_ms": sentence.time_ms,
                "sentence": sentence.number,
                "attribute": token.attribute,
                "score": near.polarity,
                "words": f"not {near.word}" if near.negated else near.word,
            }


def as_html(opinion: dict[str, Any]) -> dict[str, Any]:
    """Adds an opinion as a piece of a web page."""
    kind = "praise" if opinion["score"] > 0 else "blame"
    attribute, words = html.escape(opinion["attribute"]), html.escape(opinion["words"])
    return {**opinion, "html": f'<li class="{kind}">{attribute}: <b>{words}</b> ({opinion["score"]:+.2f})</li>'}


def _negates(word: str) -> bool:
    return word in _NEGATIONS or word.endswith(("n't", "n\u2019t"))


def _nearest(token: Token, others: list[Token]) -> Token:
    return min(others, key=lambda other: (other.clause != token.clause, abs(other.place - token.place)))


_PRODUCTS: dict[tuple[str, ...], float] = {tuple(product.lower().split()): 0.0 for product in PRODUCTS}


def _joined(tokens: tuple[Token, ...], known: dict[tuple[str, ...], float], tag: str) -> list[Token]:
    """Returns the tokens, with each known expression joined into one token."""
    words = [token.word.lower() for token in tokens]
    longest = max(map(len, known))
    joined, at = [], 0
    while at < len(tokens):
        for size in range(min(longest, len(tokens) - at), 1, -1):
            if tuple(words[at : at + size]) in known:
                word = " ".join(token.word for token in tokens[at : at + size])
                joined.append(tokens[at]._replace(word=word, tag=tag))
                at += size
                break
        else:
            joined.append(tokens[at])
            at += 1
    return joined


def _known() -> Any:
    """Returns TextBlob's knowledge of English."""
    try:
        import simplemma  # noqa: F401
        from textblob import en
    except ImportError as error:
        raise FlowError(
            f"the sentiment analysis needs {error.name}, which is not installed; "
            "pip install 'penstock-streaming[sentiment]' installs all that it needs"
        ) from None
    return en
