"""Walks the logged text with other draft lengths: expected number of rounds that begin at each token.

A log's rounds tile the text that a request emitted. A token that was drafted at depth m (from 1) and verified is *right* or
*wrong*. The token that closes a fully accepted round is *open*: it would have been tried at depth m = k + 1. With other draft
lengths rounds begin elsewhere, so the same token is tried at another depth j. P(accepted) is assumed to be

    right:  1 for j ≤ m,                           min(1, a_j / a_m) beyond
    wrong:  (a_j − a_m)⁺ / (1 − a_m) for j < m,    0 beyond
    open:   a_j

    a_j = 1 / (1 + θ·u_j·v_r)    θ: the request, u_j: the depth, v_r: the stretch, after r right tokens in a row

So a token has one difficulty, wherever the round that reaches it began. A token that was right from farther away is right from
nearer by. Where tokens differ only by chance, each depth keeps its rate. Easy and hard stretches of the text stay in place: so
full rounds end amid easy stretches, and broken ones before hard ones. u and v are separated by rounds that follow a fully
accepted one: small depth, long stretch.

π(t) = P(a round begins with token t) is computed from front to back. A round that begins at t and drafts L is followed by one
at t + j with P(token t + j − 1 is the first that fails), at t + L + 1 if none does.

Letters: R = verify rounds, Q = requests, C = cells, K = draft tokens, V = stretches, T = nodes: tokens in the order of the
text, request by request, and K + 1 spare ones behind each request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from honed.adapt.acceptance.estimate import EDGE
from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.replay.acceptance import CELL_STRENGTH, Beliefs
from honed.adapt.replay.log import Log

_RIGHT, _WRONG, _OPEN, _STRUCK = range(4)
"""_STRUCK closes a round whose further drafts a grammar rejected: the round would have ended there at any length."""
_LONGEST_STRETCH = 8
_STRETCH_STRENGTH = 32.0
"""Failures, and as many successes in odds, that hold each v at 1."""
_MOST_STRETCH = 10.0
"""Limit on v: where a stretch alone decides, v and u would diverge in opposite directions."""
_TURNS = 60


@dataclass(frozen=True)
class Odds:
    """Difficulty of tokens."""

    request: Floats  # [Q] θ
    depth: Floats  # [C, K+1] u_j; depth K + 1, which is never tried, repeats K
    stretch: Floats  # [V] v_r


class Text:
    """A log's text: each token's place, and its result in the log."""

    def __init__(self, log: Log, num_spec_tokens: int) -> None:
        self.num_spec_tokens, self._cell = num_spec_tokens, log.cell
        order = np.argsort(log.request, kind="stable")
        emitted = np.maximum(log.emitted[order], 1)
        room = np.bincount(log.request, np.maximum(log.emitted, 1), len(log.cell)).astype(np.int64)
        before = np.concatenate([[0], np.cumsum(room + num_spec_tokens + 1)])
        begin = np.cumsum(emitted) - emitted + log.request[order] * (num_spec_tokens + 1)
        self.begin: Ints = np.empty(len(order), dtype=np.int64)  # [R] node of each round's first token
        self.begin[order] = begin
        self._size = int(before[-1])
        self._starts, self._lengths = before[:-1], room
        node = np.repeat(begin - (np.cumsum(emitted) - emitted), emitted) + np.arange(int(emitted.sum()))
        owner = np.repeat(order, emitted)
        self._round: Ints = np.zeros(self._size, dtype=np.int64)
        self._round[node] = owner
        self._is_token = np.zeros(self._size, dtype=bool)
        self._is_token[node] = True
        self._depth = np.ones(self._size, dtype=np.int64)  # m
        self._depth[node] = node - self.begin[owner] + 1
        self._state = np.full(self._size, _WRONG, dtype=np.int64)
        is_last = self._depth[node] == log.accepted[owner] + 1
        closes = np.where(log.accepted < log.drafted, _WRONG, np.where(log.is_struck, _STRUCK, _OPEN))
        self._state[node] = np.where(is_last, closes[owner], _RIGHT)
        self._request = np.repeat(np.arange(len(room)), room + num_spec_tokens + 1)
        self._stretch = self._stretches()
        self._key = (self._cell[self._request] * (num_spec_tokens + 1) + self._depth - 1) * _LONGEST_STRETCH + self._stretch

    def _stretches(self) -> Ints:
        """Count the right tokens in a row before each node; an untried token neither counts nor breaks the row."""
        is_right = self._state == _RIGHT
        count = np.concatenate([[0], np.cumsum(is_right)[:-1]])
        at_break = np.where(np.concatenate([[True], (self._state == _WRONG)[:-1]]), count, 0)
        stretch: Ints = np.minimum(count - np.maximum.accumulate(at_break), _LONGEST_STRETCH - 1)
        return stretch

    def odds(self, beliefs: Beliefs, weights: Floats | None = None) -> Odds:
        """Separate depth and stretch; `weights` [Q] gives each request's weight."""
        weight = np.ones(len(self._cell)) if weights is None else weights
        width = self.num_spec_tokens + 1
        shape = (len(beliefs.curves), width, _LONGEST_STRETCH)
        failed, passed = (
            np.bincount(self._key[chosen], each[self._request[chosen]], int(np.prod(shape))).reshape(shape)[:, :-1]
            for chosen, each in (
                (self._is_token & (self._state == _WRONG), weight),
                (self._state == _RIGHT, weight * beliefs.theta),
            )
        )  # [C, K, V]
        stretch, prior = np.ones(_LONGEST_STRETCH), beliefs.priors
        for _ in range(_TURNS):
            usual = stretch[np.minimum(np.arange(width - 1), _LONGEST_STRETCH - 1)]  # the prior's rounds follow a broken one
            depth = (failed.sum(axis=2) + CELL_STRENGTH * (1.0 - prior)) / (passed @ stretch + CELL_STRENGTH * prior * usual)
            expected = (passed * depth[:, :, None]).sum(axis=(0, 1))
            stretch = (failed.sum(axis=(0, 1)) + _STRETCH_STRENGTH) / (expected + _STRETCH_STRENGTH)
            stretch = np.clip(stretch, 1.0 / _MOST_STRETCH, _MOST_STRETCH)
        depth = np.clip(np.concatenate([depth, depth[:, -1:]], axis=1), EDGE, 1.0 / EDGE)
        return Odds(beliefs.theta, depth, stretch)

    def walk(self, lengths: Ints, odds: Odds) -> Floats:
        """Expected number of rounds that begin at each node, π [T]; `lengths` [R] hold for rounds that begin within a round."""
        width = self.num_spec_tokens + 1
        move = self._moves(lengths, odds)
        begins = np.zeros(self._size + width)
        begins[self._starts] = 1.0
        by_length = np.argsort(-self._lengths, kind="stable")
        starts, sizes = self._starts[by_length], -self._lengths[by_length]
        ahead = np.arange(1, width + 1)
        for place in range(int(self._lengths.max(initial=0))):
            node = starts[: int(np.searchsorted(sizes, -place, side="left"))] + place
            begins[node[:, None] + ahead] += begins[node, None] * move[node]
        return np.where(self._is_token, begins[: self._size], 0.0)

    def rounds(self, begins: Floats) -> Floats:
        """Count the rounds that begin within each logged round, [R]."""
        rounds: Floats = np.bincount(self._round, begins, len(self.begin)).astype(np.float64)
        return rounds

    def _moves(self, lengths: Ints, odds: Odds) -> Floats:
        """P(the round that begins at a node is followed by one j nodes on), [T, K+1]."""
        width, cell, m = self.num_spec_tokens + 1, self._cell[self._request], self._depth
        is_right, is_wrong, is_open = (self._state == state for state in (_RIGHT, _WRONG, _OPEN))
        hard = odds.request[self._request] * odds.stretch[self._stretch]
        usual = 1.0 / (1.0 + hard * odds.depth[cell, m - 1])  # a_m
        wanted = np.where(self._is_token, lengths[self._round], 0)
        move, alive = np.zeros((self._size, width)), np.ones(self._size)
        for j in range(1, int(wanted.max(initial=0)) + 2):
            here = 1.0 / (1.0 + hard * odds.depth[cell, j - 1])  # a_j
            right = np.where(j <= m, 1.0, np.minimum(here / usual, 1.0))
            wrong = np.where(j < m, np.maximum(here - usual, 0.0) / (1.0 - usual), 0.0)
            token = np.where(is_right, right, np.where(is_wrong, wrong, here * is_open))
            passes = np.zeros(self._size)
            passes[: self._size - j + 1] = token[j - 1 :]
            passes *= wanted >= j
            move[:, j - 1] = alive * (1.0 - passes)
            alive = alive * passes
        return move
