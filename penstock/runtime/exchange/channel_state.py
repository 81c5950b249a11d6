"""The states of the sender's end of a channel, and the events that lead from one to the next.

How much credit a channel has, and which entry of its log comes next, changes with each message and is no state.
"""

from __future__ import annotations

from typing import Literal

from penstock.runtime.lifecycle import State, Table


class ChannelState(State):
    """The states of the sender's end of a channel."""

    CONNECTED = "CONNECTED", "It sends straight to its receiver, and holds up its sender while it has no credit."
    MEMBER = "MEMBER", "Its entries go through relays, and it holds up its sender while it has no credit."
    GONE = "GONE", "Its receiver goes back: it sends nothing, and does not hold up its sender."
    MOVED = "MOVED", "It is as if GONE; its receiver is built on another worker, which may take only smaller messages."
    CATCHING_UP = "CATCHING_UP", "It sends what its receiver has missed, and does not hold up its sender."
    IN_PIECES = "IN_PIECES", "It is as if CATCHING_UP; what is too large for the new place is sent in pieces."


ChannelEvent = Literal["disconnect", "move", "move here", "connect", "caught up", "join", "leave"]
"""`move here`: the receiver moves to the sender's worker. `join`, `leave`: the stream of relays."""

_S = ChannelState

CHANNEL: Table[ChannelState, ChannelEvent] = Table(
    ChannelState,
    ChannelState.CONNECTED,
    {
        **{(state, "disconnect"): _S.GONE for state in (_S.CONNECTED, _S.GONE, _S.CATCHING_UP)},
        # What the receiver has missed is still too large for its place.
        **{(state, "disconnect"): _S.MOVED for state in (_S.MOVED, _S.IN_PIECES)},
        **{(state, "move"): _S.MOVED for state in (_S.GONE, _S.MOVED)},
        **{(state, "move here"): _S.GONE for state in (_S.GONE, _S.MOVED)},
        (_S.GONE, "connect"): _S.CATCHING_UP,
        (_S.MOVED, "connect"): _S.IN_PIECES,
        (_S.CATCHING_UP, "caught up"): _S.CONNECTED,
        (_S.IN_PIECES, "caught up"): _S.CONNECTED,
        (_S.CONNECTED, "join"): _S.MEMBER,
        (_S.MEMBER, "leave"): _S.CONNECTED,
    },
)
