"""Types of the wire's fields with the values that each may have, so that decoding a frame checks them all.

No sum, difference or cast that a receiver makes of such values leaves 64 bits. A float is finite unless its field says more.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, ValidationError, convert

from honed.adapt.protocol.workloads import MAX_LABEL_CHARS

MAX_STEPS = 1 << 14
"""Most engine steps in a batch."""
MAX_ROUNDS = 1 << 16
"""Most verify rounds in a batch."""
MAX_TOKEN_IDS = 1 << 22
"""Most token ids in a batch, emitted ones and drafts each."""
MAX_DRAFT_TOKENS = 4096
"""Most draft tokens of a round."""
MAX_TEMPERATURE = 1e6
MAX_TEXT_CHARS = 8192

MAX_ID_CHARS = 200
MAX_RANK = 10_000

Identifier: TypeAlias = Annotated[str, Meta(max_length=MAX_ID_CHARS, pattern=r"\A[\w-][\w.-]*\Z")]
"""Id of an engine; also a file name."""
Name: TypeAlias = Annotated[str, Meta(max_length=256)]
"""Version, id of a boot, a command or an operation, or another short text."""
Label: TypeAlias = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
"""Workload."""
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
"""Name of a model, or sentences."""
FilePath: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_CHARS, pattern=r"\A[^\0]*\Z")]
"""Path of a file or folder. It has no NUL: the system's calls raise ValueError for one, not OSError."""
FilePaths: TypeAlias = Annotated[list[FilePath], Meta(max_length=256)]
Texts: TypeAlias = Annotated[list[Text], Meta(max_length=256)]
Labels: TypeAlias = Annotated[list[Label], Meta(max_length=1024)]
Details: TypeAlias = Annotated[dict[Name, Text], Meta(max_length=4096)]

Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**62 - 1)]
"""Sequence or step number, or a clock's nanoseconds."""
PositiveNumber: TypeAlias = Annotated[int, Meta(ge=1, le=2**62 - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
"""Total of a boot, or of a step."""
Tokens: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Tokens or requests of a step, or a position."""
Drafts: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)]
"""Tokens of a round."""
Requests: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 20)]
Most: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""Upper limit; −1: none."""
TokenId: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""−1: unknown."""
Hash: TypeAlias = Annotated[int, Meta(ge=0)]
"""64 bits, unsigned."""
Real: TypeAlias = Annotated[float, Meta(ge=-1e300, le=1e300)]
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1e300)]
Reals: TypeAlias = Annotated[list[Real], Meta(max_length=1 << 16)]
Amounts: TypeAlias = Annotated[list[Amount], Meta(max_length=1 << 16)]
Figures: TypeAlias = Annotated[dict[Name, Real], Meta(max_length=256)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]

Sizes: TypeAlias = Annotated[list[Tokens], Meta(max_length=MAX_ROUNDS)]
"""Token counts of captured graphs."""
StepNumbers: TypeAlias = Annotated[list[Number], Meta(max_length=MAX_STEPS)]
StepCounts: TypeAlias = Annotated[list[Count], Meta(max_length=MAX_STEPS)]
StepTokens: TypeAlias = Annotated[list[Tokens], Meta(max_length=MAX_STEPS)]
StepReasons: TypeAlias = Annotated[list[Label], Meta(max_length=MAX_STEPS)]
RoundNumbers: TypeAlias = Annotated[list[Number], Meta(max_length=MAX_ROUNDS)]
RoundHashes: TypeAlias = Annotated[list[Hash], Meta(max_length=MAX_ROUNDS)]
RoundTokens: TypeAlias = Annotated[list[Tokens], Meta(max_length=MAX_ROUNDS)]
RoundDrafts: TypeAlias = Annotated[list[Drafts], Meta(max_length=MAX_ROUNDS)]
RoundTemperatures: TypeAlias = Annotated[list[Temperature], Meta(max_length=MAX_ROUNDS)]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]


def check_engine_id(text: str) -> None:
    """Check an engine's id as an operator gives it, before "-" and the data-parallel rank are added. Raises ValueError."""
    try:
        convert(f"{text}-{MAX_RANK}", Identifier)
    except ValidationError as error:
        most = MAX_ID_CHARS - len(f"-{MAX_RANK}")
        cure = f"use letters, digits, '-', '_' and '.' only, no '.' first, {most} at most"
        raise ValueError(f"{text!r} is no engine id: {cure}") from error
