"""The events of the Nexmark benchmark, made of nothing but a seed and their number.

Nexmark (by Tucker, Tufte, Papadimos and Maier) is the stream of an auction site: people join, open auctions and bid.
Of each 50 events, the first is a person, the next three are auctions and the other 46 are bids. All values of an event
are drawn from a hash of (seed, number). So an event must never depend on anything but these two: the same events come
in every run, from any number of tasks, and a source that goes back to a number gives again what it gave before.

Proportions, skews, ids, lists of names, prices and sizes are those of the generator that is published with the SQL
queries (nexmark/nexmark on GitHub). These decisions are our own, and frozen, because measured results depend on them:

- An event is a flat dict. Its field "kind" is "person", "auction" or "bid", and all kinds have "date_time". Times are
  milliseconds since 1970, prices are cents, and both are int, like all ids. Everything else is str.
- Names of fields are written with underscores: "email_address", "item_name", "initial_bid".
- A seller, a bidder or the auction of a bid may be one of the next ten that have not come yet, as in the published
  generator. A join must therefore wait for both sides. With `lead=0` each id is one that has come.
- A bidder is one of the people. The published generator adds the first id of people twice to bidders, so that there a
  bidder is somebody who comes a thousand persons later.
- Without skew, times never decrease. With `skew_ms`, an event's time is up to so much before its turn, and never before
  `start_ms`. A watermark that is out of order by `skew_ms` therefore finds no event late.
- Random texts are slices of one text of the seed. Names and descriptions have blanks, all other texts are letters.
"""

from __future__ import annotations

import math
import string
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from random import Random
from typing import Any

from penstock.runtime.sources.pace import Schedule, Steps
from penstock.runtime.units import whole

Event = dict[str, Any]

PERSONS, AUCTIONS, BIDS = 1, 3, 46  # in each round of events, in this order
ROUND = PERSONS + AUCTIONS + BIDS

FIRST_PERSON, FIRST_AUCTION, FIRST_CATEGORY = 1000, 1000, 10  # the least ids
CATEGORIES = 5
ACTIVE_PEOPLE = 1000  # the newest so many sell and bid
IN_FLIGHT = 100  # auctions; bids are for the newest so many and the one before
LEAD = 10  # so many of the next persons and auctions may be referred to before they come

HOT_GROUP = 100  # the first auction of each so many is hot, likewise a seller; the second person is a hot bidder
HOT_AUCTION_RATIO = 2  # all bids but one in so many are for the hot auction
HOT_SELLER_RATIO = 4
HOT_BIDDER_RATIO = 4
HOT_CHANNEL_RATIO = 2

HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
CHANNELS = 10_000  # the others, "channel-0" and so on
CHANNEL_ID_SHARE = 0.9  # of the urls of the others have a channel_id

STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES = (
    "Phoenix",
    "Los Angeles",
    "San Francisco",
    "Boise",
    "Portland",
    "Bend",
    "Redmond",
    "Seattle",
    "Kent",
    "Cheyenne",
)
FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")

PERSON_BYTES, AUCTION_BYTES, BID_BYTES = 200, 500, 100  # of an event on average, to which "extra" fills it up
_NUMBERS_BYTES_BID, _NUMBERS_BYTES_AUCTION, _NUMBERS_BYTES_PERSON = 32, 48, 8  # a number counts for eight bytes

START_MS = 1_700_000_000_000  # of the first event, where nothing else is said; the beginning of a window
RATE = 10_000  # events a second of event time, likewise; that of the published generator

_POOL_BITS = 20  # the texts of a seed are slices of 1 MiB of letters
_WORD_BITS = 32
_NUMBER_MAX = 1 << 53  # the schedule counts in doubles
# Of the 64 bytes of an event's hash: four choices between few things, and then as many words as its kind needs.
_BID_WORDS, _AUCTION_WORDS, _PERSON_WORDS = struct.Struct("<4H7I"), struct.Struct("<4H14I"), struct.Struct("<4H12IQ")


class Events:
    """Makes the event of a number: `Events(seed)(n)`.

        flow.read(ps.sources.Generator(Events(1), rate=10_000))
        list(Events(1, 1000, rate=500, skew_ms=200))       # the first thousand: two seconds of event time

    `events`: how many there are (None: no end); the numbers from there on raise IndexError.
    `rate`: events a second, or steps, as of `sources.Generator`: what the events' times follow. How long an auction
    lasts follows from it: on average as long as the next hundred auctions take to come.
    `start_ms`: the time of event 0. `skew_ms`: times are up to so much before their turn. `lead`: how many of the next
    persons and auctions an event may refer to.

    `Events` travels to workers as these few values.
    """

    def __init__(
        self,
        seed: int = 0,
        events: int | None = None,
        *,
        rate: float | str | Steps = RATE,
        start_ms: int = START_MS,
        skew_ms: int = 0,
        lead: int = LEAD,
    ) -> None:
        self.seed = whole(seed, "Events: seed", 0)
        self.events = None if events is None else whole(events, "Events: events", 0)
        self.rate = rate
        self.start_ms = whole(start_ms, "Events: start_ms", 0)
        self.skew_ms = whole(skew_ms, "Events: skew_ms", 0)
        self.lead = whole(lead, "Events: lead", 0)
        self._end = _NUMBER_MAX if self.events is None else self.events
        self._turns = _Turns(Schedule(rate).steps)
        self._hash = blake2b(b"%d:" % self.seed)
        self._texts = _texts(self.seed)

    def __reduce__(self) -> tuple[Any, ...]:
        named: dict[str, Any] = {
            "rate": self.rate,
            "start_ms": self.start_ms,
            "skew_ms": self.skew_ms,
            "lead": self.lead,
        }
        return partial(type(self), self.seed, self.events, **named), ()

    def __iter__(self) -> Iterator[Event]:
        """Makes all events in the order of their numbers."""
        return map(self, range(self._end))

    def __call__(self, number: int) -> Event:
        """Makes the event of this number, counted from 0."""
        if not 0 <= number < self._end:
            raise IndexError(f"Events: there is no event {number}; there are {self._end:,}, from 0 on")
        hashed = self._hash.copy()
        hashed.update(b"%d" % number)
        rounds, turn = divmod(number, ROUND)
        time = self.start_ms + self._turns.ms_of(number)
        if turn >= PERSONS + AUCTIONS:
            return self._bid(hashed.digest(), rounds, time)
        if turn >= PERSONS:
            return self._auction(hashed.digest(), number, rounds, turn - PERSONS, time)
        return self._person(hashed.digest(), rounds, time)

    def _bid(self, digest: bytes, rounds: int, time: int) -> Event:
        hot_auction, hot_bidder, hot_channel, which, skew, auction, bidder, price, channel, size, offset = (
            _BID_WORDS.unpack_from(digest)
        )
        texts = self._texts
        last = rounds * AUCTIONS + AUCTIONS - 1
        if hot_auction % HOT_AUCTION_RATIO:
            auction = last - last % HOT_GROUP
        else:
            first = last - IN_FLIGHT if last > IN_FLIGHT else 0
            auction = first + (auction * (last - first + 1 + self.lead) >> _WORD_BITS)
        if hot_bidder % HOT_BIDDER_RATIO:
            bidder = rounds - rounds % HOT_GROUP + 1
            if bidder > rounds and not self.lead:
                bidder = rounds
        else:
            bidder = self._someone(bidder, rounds)
        if hot_channel % HOT_CHANNEL_RATIO:
            channel, url = texts.hot_channels[which % len(HOT_CHANNELS)]
        else:
            channel, url = texts.channels[channel * CHANNELS >> _WORD_BITS]
        offset >>= _WORD_BITS - _POOL_BITS
        if self.skew_ms:
            time = self._skewed(time, skew)
        return {
            "kind": "bid",
            "auction": FIRST_AUCTION + auction,
            "bidder": FIRST_PERSON + bidder,
            "price": _price(price),
            "channel": channel,
            "url": url,
            "date_time": time,
            "extra": texts.letters[offset : offset + _extra(size, BID_BYTES - _NUMBERS_BYTES_BID)],
        }

    def _auction(self, digest: bytes, number: int, rounds: int, which: int, time: int) -> Event:
        hot_seller, _, _, _, skew, seller, category, initial, reserve, length, *words = _AUCTION_WORDS.unpack(digest)
        name_size, name, about_size, about, size, offset, *_ = words
        texts = self._texts
        if hot_seller % HOT_SELLER_RATIO:
            seller = rounds - rounds % HOT_GROUP
        else:
            seller = self._someone(seller, rounds)
        # The average auction lasts until IN_FLIGHT more auctions have come.
        ahead = number + IN_FLIGHT * ROUND // AUCTIONS
        average = self._turns.ms_of(ahead) - self._turns.ms_of(number)
        time = self._skewed(time, skew)
        item_name, description = texts.words(name, name_size, 20), texts.words(about, about_size, 100)
        initial_bid = _price(initial)
        used = _NUMBERS_BYTES_AUCTION + len(item_name) + len(description)
        offset >>= _WORD_BITS - _POOL_BITS
        return {
            "kind": "auction",
            "id": FIRST_AUCTION + rounds * AUCTIONS + which,
            "item_name": item_name,
            "description": description,
            "initial_bid": initial_bid,
            "reserve": initial_bid + _price(reserve),
            "date_time": time,
            "expires": time + 1 + (length * max(2 * average, 1) >> _WORD_BITS),
            "seller": FIRST_PERSON + seller,
            "category": FIRST_CATEGORY + (category * CATEGORIES >> _WORD_BITS),
            "extra": texts.letters[offset : offset + _extra(size, AUCTION_BYTES - used)],
        }

    def _person(self, digest: bytes, rounds: int, time: int) -> Event:
        first, last, city, state, skew, *words, digits = _PERSON_WORDS.unpack(digest)
        user_size, user, host_size, host, size, offset, *_ = words
        texts = self._texts
        name = f"{FIRST_NAMES[first % len(FIRST_NAMES)]} {LAST_NAMES[last % len(LAST_NAMES)]}"
        email = f"{texts.word(user, user_size, 7)}@{texts.word(host, host_size, 5)}.com"
        card = f"{digits % 10**16:016}"
        card = f"{card[:4]} {card[4:8]} {card[8:12]} {card[12:]}"
        home, where = CITIES[city % len(CITIES)], STATES[state % len(STATES)]
        used = _NUMBERS_BYTES_PERSON + len(name) + len(email) + len(card) + len(home) + len(where)
        offset >>= _WORD_BITS - _POOL_BITS
        return {
            "kind": "person",
            "id": FIRST_PERSON + rounds,
            "name": name,
            "email_address": email,
            "credit_card": card,
            "city": home,
            "state": where,
            "date_time": self._skewed(time, skew),
            "extra": texts.letters[offset : offset + _extra(size, PERSON_BYTES - used)],
        }

    def _someone(self, word: int, last: int) -> int:
        """Draws one of the active people, ending with the given last one, or one of the next few."""
        active = min(last + 1, ACTIVE_PEOPLE)
        return last + 1 - active + (word * (active + self.lead) >> _WORD_BITS)

    def _skewed(self, time: int, word: int) -> int:
        return max(self.start_ms, time - (word * (self.skew_ms + 1) >> _WORD_BITS))


def _price(word: int) -> int:
    """Returns a price in cents between one dollar and a million, whose logarithm is drawn evenly."""
    return int(10.0 ** (word * _PRICE_STEP) * 100.0 + 0.5)


_PRICE_STEP = 6.0 / (1 << _WORD_BITS)


def _extra(word: int, room: int) -> int:
    """Returns a length within a fifth of the room that is left, so that events have their size on average."""
    if room <= 0:
        return 0
    by = (room + 2) // 5  # rounded
    return room - by + (word * 2 * by >> _WORD_BITS)


class _Turns:
    """Tells when each event has its turn, in whole milliseconds after the start.

    These are the times of a `Schedule` of the same steps, one at a time and without numpy, whose calls would take
    longer than all the rest of an event.
    """

    def __init__(self, steps: list[tuple[float, float | None]]) -> None:
        steady = steps[0][0] if len(steps) == 1 else 0.0
        self._rate: float = int(steady) if steady == int(steady) else steady  # an int is exact, however many events
        if steady:
            return
        self._counts, self._times = [0.0], [0.0]  # at the start of each step
        self._rates = [rate for rate, _ in steps]
        for rate, seconds in steps:
            length = math.inf if seconds is None else seconds
            self._counts.append(self._counts[-1] + (rate * length if rate else 0.0))
            self._times.append(self._times[-1] + length)

    def ms_of(self, number: int) -> int:
        """Returns the time of this event's turn."""
        if self._rate:
            return int(number * 1000 // self._rate)
        cycle, left = 0.0, float(number)
        if self._counts[-1] < math.inf:
            cycle, left = divmod(left, self._counts[-1])
        # A step without events is passed over, as all counts in it are those of its start.
        step = bisect_right(self._counts, left) - 1
        seconds = self._times[step] + (left - self._counts[step]) / self._rates[step]
        if cycle:
            seconds += cycle * self._times[-1]
        return int(seconds * 1000)


@dataclass(frozen=True)
class _Texts:
    """Holds the texts of a seed."""

    letters: str
    blanked: str  # the same with a blank at about one place in thirteen
    hot_channels: list[tuple[str, str]]  # (channel, url)
    channels: list[tuple[str, str]]

    def word(self, place: int, size: int, below: int) -> str:
        """Returns three letters or more, fewer than `below`, from a random place."""
        return _slice(self.letters, place, size, below)

    def words(self, place: int, size: int, below: int) -> str:
        """Returns words of three characters or more together, fewer than `below`, less the blanks around them."""
        return _slice(self.blanked, place, size, below).strip()


def _slice(text: str, place: int, size: int, below: int) -> str:
    place >>= _WORD_BITS - _POOL_BITS
    return text[place : place + 3 + (size * (below - 3) >> _WORD_BITS)]


@lru_cache(maxsize=4)
def _texts(seed: int) -> _Texts:
    random = Random(f"nexmark {seed}")  # texts seed it the same way in every process
    length = (1 << _POOL_BITS) + max(PERSON_BYTES, AUCTION_BYTES, BID_BYTES)
    alphabet = string.ascii_lowercase.encode()
    letters = random.randbytes(length).translate(bytes(alphabet[i % len(alphabet)] for i in range(256)))
    holes = random.randbytes(length).translate(bytes(0xFF if i % 13 else 0x20 for i in range(256)))
    # A blank is the bit 0x20 of every letter, so "and" leaves a letter or makes a blank.
    blanked = int.from_bytes(letters, "little") & int.from_bytes(holes, "little")

    def url() -> str:
        names = ("".join(random.choices(_DIRECTORY, k=random.randint(3, 4))) for _ in range(3))
        return f"https://www.nexmark.com/{'/'.join(names)}/item.htm?query=1"

    def channel(number: int) -> tuple[str, str]:
        parameter = f"&channel_id={_channel_id(number)}" if random.random() < CHANNEL_ID_SHARE else ""
        return f"channel-{number}", url() + parameter

    return _Texts(
        letters.decode(),
        blanked.to_bytes(length, "little").decode(),
        [(name, url()) for name in HOT_CHANNELS],
        [channel(number) for number in range(CHANNELS)],
    )


_DIRECTORY = string.ascii_lowercase * 12 + "_" * 26  # of which one in thirteen is an underscore


def _channel_id(number: int) -> int:
    """Returns the size of the signed number whose 32 bits are the bits of this one in reverse. Two channels may have
    the same id."""
    bits = int(f"{number:032b}"[::-1], 2)
    return min(bits, (1 << 32) - bits)
