"""Known rules for draft lengths, by name, to compare with the default, adapt.lengths.decider.

    name        looks at                                      draft lengths
    static      nothing                                       static_k
    table       batch size                                    k of the first row that is large enough, as vLLM's own table
    threshold   accepted / drafted in a request's window      one less below 60 %, one more above 90 %, from K on
    ema         EMA of the engine's accepted tokens           tier 1, 3, 7, … K, with hysteresis, as SGLang's
    kelly       EMA of accepted / drafted, step times         argmax of expected tokens over a linear cost, as mirror-sd's
    tide        acceptance, step times                        max_k while the expected speed-up is above 1, else none

They follow their authors' versions, known weaknesses included; their docstrings name the differences. Each gives min(rule,
max_k, the request's ceiling). Where all requests of a step must get one of some lengths, the rule's is rounded down to one of
these. A rule that never chooses 0, and would never leave it, then chooses at least the shortest of these.
"""

from __future__ import annotations

from honed.adapt.lengths.rules_base import LengthRule
from honed.adapt.lengths.rules_counted import EmaTiers, Static, Table, Threshold
from honed.adapt.lengths.rules_priced import Kelly, Tide

_CLASSES: dict[str, type[LengthRule]] = {rule.name: rule for rule in (Static, Table, Threshold, EmaTiers, Kelly, Tide)}
RULES: tuple[str, ...] = tuple(_CLASSES)
"""Names that `make_rule` knows; a decision's `reason` is the name of its rule."""


def make_rule(name: str, num_spec_tokens: int, seed: int = 0) -> LengthRule:
    """Make a rule by name.

    Raises:
        ValueError: no such rule; the message names the known ones.
    """
    if name not in _CLASSES:
        raise ValueError(f"unknown length policy {name!r}, known are {', '.join(RULES)}")
    return _CLASSES[name](num_spec_tokens, seed)
