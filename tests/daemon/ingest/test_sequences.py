from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.ingest.sequences import BootSequence, Offer

PEER = b"peer"


def welcomed(accepted: int = 0) -> BootSequence:
    sequence = BootSequence(accepted=accepted)
    sequence.welcome(PEER)
    return sequence


def take(sequence: BootSequence, seq: int, first_seq: int = 0, peer: bytes = PEER) -> tuple[Offer, int]:
    offer, missing = sequence.offer(first_seq, seq, peer)
    if offer is Offer.TAKE:
        sequence.take(seq)
    return offer, missing


def test_in_order_all_are_taken_and_again_none_is() -> None:
    sequence = welcomed()
    assert [take(sequence, seq) for seq in (1, 2, 3)] == [(Offer.TAKE, 0)] * 3
    assert [take(sequence, seq) for seq in (1, 2, 3)] == [(Offer.DUPLICATE, 0)] * 3


def test_what_follows_a_hole_is_refused_until_the_hole_is_filled() -> None:
    sequence = welcomed()
    take(sequence, 1)
    assert take(sequence, 3) == (Offer.AHEAD, 0)
    assert take(sequence, 2) == (Offer.TAKE, 0)
    assert take(sequence, 3) == (Offer.TAKE, 0)


def test_an_empty_batch_stands_for_those_that_were_dropped() -> None:
    sequence = welcomed()
    take(sequence, 1)
    assert take(sequence, 9, first_seq=2) == (Offer.TAKE, 0)
    assert take(sequence, 10) == (Offer.TAKE, 0)
    assert take(sequence, 9, first_seq=2) == (Offer.DUPLICATE, 0)


def test_the_first_batch_after_a_welcome_is_as_far_back_as_the_engine_can_go() -> None:
    sequence = welcomed(accepted=4)
    assert take(sequence, 8) == (Offer.TAKE, 3)
    assert take(sequence, 10) == (Offer.AHEAD, 0)


def test_a_batch_of_an_older_connection_is_no_first_batch() -> None:
    sequence = welcomed(accepted=4)
    assert take(sequence, 8, peer=b"old") == (Offer.AHEAD, 0)
    assert take(sequence, 5) == (Offer.TAKE, 0)


def test_a_batch_without_room_is_due_again() -> None:
    sequence = welcomed()
    assert sequence.offer(0, 1, PEER) == (Offer.TAKE, 0)  # no room: not confirmed
    assert take(sequence, 2) == (Offer.AHEAD, 0)
    assert take(sequence, 1) == (Offer.TAKE, 0)


def test_a_second_welcome_of_a_connection_opens_no_hole() -> None:
    """A batch without room was lost when its engine introduced itself again meanwhile: the next one was taken first."""
    sequence = welcomed()
    assert sequence.offer(0, 1, PEER) == (Offer.TAKE, 0)  # no room: not confirmed
    sequence.welcome(PEER)
    assert take(sequence, 2) == (Offer.AHEAD, 0)
    assert take(sequence, 1) == (Offer.TAKE, 0)
    sequence.welcome(b"another")
    assert take(sequence, 4, peer=b"another") == (Offer.TAKE, 2)


def test_a_first_batch_after_a_hole_without_room_is_due_again_too() -> None:
    sequence = welcomed(accepted=4)
    assert sequence.offer(0, 8, PEER) == (Offer.TAKE, 3)
    assert take(sequence, 9) == (Offer.AHEAD, 0)
    assert take(sequence, 8) == (Offer.TAKE, 3)


@given(st.lists(st.integers(1, 12), max_size=60))
def test_whatever_comes_each_number_is_taken_at_most_once_and_in_order(numbers: list[int]) -> None:
    sequence, taken, lost = welcomed(), [], 0
    for seq in numbers:
        offer, missing = take(sequence, seq)
        if offer is Offer.TAKE:
            taken.append(seq)
            lost += missing
    assert taken == sorted(set(taken))
    assert len(taken) + lost == (taken[-1] if taken else 0)
