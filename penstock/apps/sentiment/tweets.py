"""Generated tweets about products (docs/papers.md: A10), of which it is known what they say.

The paper's million tweets are not public, so these are made of sentences with gaps. Each is about attributes of a
product, in English or in another language, and carries what tweets carry: a name with @, a hashtag, a link, an emoji.
A tweet is a hash of (seed, number) and never depends on other tweets, so that the same tweets come in every run, in any
order, from any number of tasks. `truth` says what an analysis should find in it.

A tweet is a tuple (number, time_ms, text).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.apps.hashing import GOLDEN, mixed
from penstock.runtime.errors import FlowError

Tweet = tuple[int, int, str]
"""(number, time_ms, text): `time_ms` since 1970."""

NUMBER: Final = 0
TIME_MS: Final = 1
TEXT: Final = 2

RATE = 1_000  # tweets a second of event time, where nothing else is said
START_MS = 1_700_000_000_000
ENGLISH_SHARE = 0.7

PRODUCTS = ("Nova 5", "Orbit X", "Terra Mini", "Luna Pro", "Vega 12")

#: The attributes, each with the words that tweets have for it. The first one is its name.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "battery": ("battery", "batteries"),
    "camera": ("camera", "cam"),
    "screen": ("screen", "display"),
    "sound": ("sound",),
    "keyboard": ("keyboard", "keyboards"),
    "software": ("software",),
    "price": ("price", "prices"),
    "speaker": ("speaker", "speakers"),
}

_GOOD = ("great", "good", "excellent", "beautiful", "amazing", "perfect", "impressive", "wonderful")
_BAD = ("awful", "terrible", "bad", "poor", "horrible", "disappointing", "annoying", "ugly")
# Each for one thing, and for several.
_GOOD_PHRASES = (("works like a charm", "work like a charm"), ("blew me away", "blew me away"))
_BAD_PHRASES = (("is a waste of money", "are a waste of money"), ("let me down", "let me down"))
_DEGREES = ("", "really ", "very ", "absolutely ")
_OPENINGS = ("", "", "@{0}_fan ", "RT @shop: ", "Hey @{0}, ")
_ENDINGS = ("", "", " #unboxing", " https://t.co/{1:x}", " \U0001f4f1", " &amp; that is all")

_OTHERS = (
    "Der Akku von meinem Telefon ist leider sehr schlecht, aber die Kamera gefällt mir wirklich gut",
    "Ich habe heute das neue Gerät gekauft und bin mit dem Bildschirm überhaupt nicht zufrieden",
    "La batterie de mon téléphone est vraiment mauvaise, mais j'aime beaucoup la caméra",
    "Je viens de recevoir le nouvel appareil et l'écran est magnifique, merci beaucoup",
    "La cámara de mi teléfono nuevo es muy buena, pero la batería no dura nada",
    "Acabo de comprar este aparato y la pantalla me parece realmente preciosa",
)
_PLAIN = (
    "I bought my {product} on Monday.",
    "Waiting for the {product} to arrive.",
    "Has anyone seen the {product} yet?",
)


class Tweets:
    """Makes the tweet of a number, for a `Generator`:

        flow.read(ps.sources.Generator(Tweets(seed=1), rate=1_000))

    `rate`: tweets a second of event time, from `start_ms` on; numbers are in the order of times. `english_share`: the
    part of the tweets that is in English.
    """

    def __init__(
        self, seed: int = 0, *, rate: float = RATE, start_ms: int = START_MS, english_share: float = ENGLISH_SHARE
    ) -> None:
        if not rate > 0:
            raise FlowError(f"Tweets: rate must be above 0, got {rate}")
        if start_ms < 0:
            raise FlowError(f"Tweets: start_ms must not be negative, got {start_ms}")
        if not 0 <= english_share <= 1:
            raise FlowError(f"Tweets: english_share must be between 0 and 1, got {english_share}")
        self.seed = seed
        self.rate = rate
        self.start_ms = start_ms
        self.english_share = english_share

    def __call__(self, number: int) -> Tweet:
        return number, self.start_ms + int(number * 1000 / self.rate), self._made(number)[0]

    def truth(self, number: int) -> list[tuple[str, int]]:
        """Returns the sentiment of the tweet: (attribute, 1 for praise or -1 for blame) of each attribute, in order. It
        is empty for tweets that are not in English, or say nothing of an attribute."""
        return self._made(number)[1]

    def _made(self, number: int) -> tuple[str, list[tuple[str, int]]]:
        draw = _draws(mixed(self.seed * GOLDEN + GOLDEN) + number * GOLDEN)
        if draw(1 << 32) >= self.english_share * (1 << 32):
            return _OTHERS[draw(len(_OTHERS))], []
        product = PRODUCTS[draw(len(PRODUCTS))]
        said: list[tuple[str, int]] = []
        sentences = [_sentence(draw, product, said) for _ in range(1 + draw(3))]
        opening = _OPENINGS[draw(len(_OPENINGS))].format(product.split()[0].lower())
        ending = _ENDINGS[draw(len(_ENDINGS))].format("", mixed(number) >> 40)
        return opening + " ".join(sentences) + ending, said


def _draws(key: int) -> Callable[[int], int]:
    """Returns a generator of numbers from 0 to below a limit."""
    state = mixed(key)

    def draw(limit: int) -> int:
        nonlocal state
        state = mixed(state + GOLDEN)
        return state % limit

    return draw


def _sentence(draw: Callable[[int], int], product: str, said: list[tuple[str, int]]) -> str:
    """Makes a sentence, and notes its sentiment."""
    kind = draw(8)
    if kind == 0:
        return _PLAIN[draw(len(_PLAIN))].format(product=product)
    word, adjective, sign, name = _opinion(draw)
    several = word.endswith("s")
    verb = "are" if several else "is"
    if kind == 1:
        said.append((name, -sign))
        return f"The {word} of my {product} {verb} not {adjective}."
    if kind == 2:
        sign = 1 - 2 * draw(2)
        phrases = _GOOD_PHRASES if sign > 0 else _BAD_PHRASES
        said.append((name, sign))
        return f"The {word} {phrases[draw(len(phrases))][several]}!"
    if kind == 3:
        other, second, other_sign, other_name = _opinion(draw)
        said += [(name, sign), (other_name, other_sign)]
        second_verb = "are" if other.endswith("s") else "is"
        return f"The {word} {verb} {adjective}, but the {other} {second_verb} {second}."
    said.append((name, sign))
    if kind == 4:
        article = "" if several else "an " if adjective[0] in "aeiou" else "a "
        return f"What {article}{adjective} {word}!"
    return f"The {word} of the {product} {verb} {_DEGREES[draw(len(_DEGREES))]}{adjective}."


def _opinion(draw: Callable[[int], int]) -> tuple[str, str, int, str]:
    """Returns a word for an attribute, an adjective, its sign, and the name of the attribute."""
    names = list(ATTRIBUTES)
    name = names[draw(len(names))]
    words = ATTRIBUTES[name]
    sign = 1 - 2 * draw(2)
    adjectives = _GOOD if sign > 0 else _BAD
    return words[draw(len(words))], adjectives[draw(len(adjectives))], sign, name
