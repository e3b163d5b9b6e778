import contextlib
import types
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.adapt.protocol import wire

TO_DAEMON = [
    wire.EngineHello,
    wire.EventBatch,
    wire.EngineStatus,
    wire.CommandResult,
    wire.TrainerHello,
    wire.TrainerStatus,
    wire.TrainResult,
    wire.Purged,
]
TO_ENGINE = [wire.Welcome, wire.Ack, wire.Policy, wire.SwapCommand, wire.ChecksumCommand]
TO_TRAINER = [wire.Welcome, wire.TrainRequest, wire.TrainCancel, wire.TrainPause, wire.Purge]
DIRECTIONS = [(wire.decode_to_daemon, TO_DAEMON), (wire.decode_to_engine, TO_ENGINE), (wire.decode_to_trainer, TO_TRAINER)]
CASES = [(decode, message) for decode, messages in DIRECTIONS for message in messages]

# msgpack carries integers of 64 bits, and text that is Unicode without lone surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SCALARS = {float: st.floats(allow_nan=False), str: TEXT, bool: st.booleans()}


def within(kind, bounds):
    """Values of a type with bounds."""
    if kind is str and bounds.pattern:
        return st.from_regex(bounds.pattern).filter(lambda text: len(text) <= bounds.max_length)
    if kind is int:
        return st.integers(bounds.ge, 2**64 - 1 if bounds.le is None else bounds.le)
    return st.floats(bounds.ge, bounds.le) if kind is float else values_of(kind)


def values_of(kind):
    """Values of a field's type."""
    if typing.get_origin(kind) is typing.Annotated:
        return within(*typing.get_args(kind))
    if kind in SCALARS:
        return SCALARS[kind]
    if typing.get_origin(kind) is list:
        return st.lists(values_of(typing.get_args(kind)[0]), max_size=3)
    if typing.get_origin(kind) is tuple:
        return st.tuples(*map(values_of, typing.get_args(kind)))
    if typing.get_origin(kind) is dict:
        return st.dictionaries(TEXT, values_of(typing.get_args(kind)[1]), max_size=2)
    if typing.get_origin(kind) is types.UnionType:
        return st.one_of(*map(values_of, typing.get_args(kind)))
    return st.none() if kind is types.NoneType else messages_of(kind)


def messages_of(kind):
    """Messages of a class, with some of the fields that have defaults left out."""
    fields = msgspec.structs.fields(kind)
    required = {f.name: values_of(f.type) for f in fields if f.required}
    optional = {f.name: values_of(f.type) for f in fields if not f.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda figures: kind(**figures))


MESSAGES = {kind: messages_of(kind) for _, kind in CASES}


def ids(case):
    return f"{case[0].__name__}-{case[1].__name__}"


@pytest.mark.parametrize("case", CASES, ids=ids)
@settings(max_examples=20)
@given(data=st.data())
def test_every_message_survives_the_way_through_a_frame(case, data):
    decode, kind = case
    message = data.draw(MESSAGES[kind])
    assert decode(wire.encode(message)) == message


@pytest.mark.parametrize("case", CASES, ids=ids)
@settings(max_examples=20)
@given(data=st.data())
def test_fields_of_a_newer_version_are_ignored(case, data):
    decode, kind = case
    message = data.draw(MESSAGES[kind])
    raw = msgspec.msgpack.decode(wire.encode(message))
    raw["a_field_of_the_future"] = {"nested": [1, 2.5, None, "x"]}
    assert decode(msgspec.msgpack.encode(raw)) == message


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_defaulted_fields_may_be_missing_and_required_ones_may_not(case):
    decode, kind = case
    fields = msgspec.structs.fields(kind)
    values = {int: 1, float: 1.0, str: "x", bool: True, list: []}
    values[wire.DrafterWeights] = {"type": "DrafterWeights", "version": "v", "path": "p"}

    def value_of(kind):
        kind = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
        return values.get(typing.get_origin(kind) or kind, {})

    raw = {f.name: value_of(f.type) for f in fields if f.required} | {"type": kind.__name__}
    message = decode(msgspec.msgpack.encode(raw))
    assert isinstance(message, kind)
    required = [f.name for f in fields if f.required]
    for name in required:
        if name not in ("steps", "rounds"):
            with pytest.raises(wire.WireError, match=name):
                decode(msgspec.msgpack.encode({k: v for k, v in raw.items() if k != name}))


@pytest.mark.parametrize("decode", [decode for decode, _ in DIRECTIONS])
@given(frame=st.one_of(st.binary(max_size=200), st.binary(max_size=30).map(lambda tail: b"\x81\xa4type" + tail)))
def test_garbage_is_a_wire_error_or_a_message(decode, frame):
    with contextlib.suppress(wire.WireError):
        decode(frame)


@pytest.mark.parametrize("case", CASES, ids=ids)
@settings(max_examples=20)
@given(data=st.data())
def test_a_frame_cut_off_or_altered_never_raises_anything_else(case, data):
    decode, kind = case
    frame = bytearray(wire.encode(data.draw(MESSAGES[kind])))
    with pytest.raises(wire.WireError):
        decode(bytes(frame[: data.draw(st.integers(0, len(frame) - 1))]))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(wire.WireError):
        decode(bytes(frame))


def test_a_tag_of_a_newer_version_is_a_wire_error():
    for decode, _ in DIRECTIONS:
        with pytest.raises(wire.WireError, match=r"wire version 1: .*MessageOfTheFuture") as caught:
            decode(msgspec.msgpack.encode({"type": "MessageOfTheFuture", "x": 1}))
        assert isinstance(caught.value.__cause__, msgspec.ValidationError)


def test_messages_of_another_direction_are_refused():
    with pytest.raises(wire.WireError):
        wire.decode_to_daemon(wire.encode(wire.Ack(boot_id="b", seq=1)))
    with pytest.raises(wire.WireError):
        wire.decode_to_engine(wire.encode(wire.TrainPause(paused=True)))


def test_deep_nesting_is_a_wire_error():
    with pytest.raises(wire.WireError):
        wire.decode_to_daemon(b"\x91" * 100_000)


def test_wrong_types_are_refused_rather_than_converted():
    with pytest.raises(wire.WireError, match="seq"):
        wire.decode_to_engine(msgspec.msgpack.encode({"type": "Ack", "boot_id": "b", "seq": "7"}))


def test_the_wire_is_maps_with_the_class_name_as_tag():
    raw = msgspec.msgpack.decode(wire.encode(wire.Ack(boot_id="b", seq=7)))
    assert raw == {"type": "Ack", "boot_id": "b", "seq": 7}


def test_a_default_list_is_not_shared_between_messages():
    first, second = (wire.StepColumns() for _ in range(2))
    first.step.append(1)
    assert second.step == []
