"""When the trainer may compute on a device that serving uses too, and how it stops when a request arrives.

Between units it is asked with `may_begin`. Amid a unit it stops on a CPU alone (`yield_points`): the unit waits in `_stand_by`
until the engines' requests are done, or `SpareTime` lets it go on beside them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.process.busy_flags import BusyFlags, Idleness, Preemptions
from honed.recalib.process.spare_time import SpareTime
from honed.recalib.process.yield_points import YieldPoints

_BUSY_TICKS_S = 0.002, 0.02
"""Time between reads of the flags while a unit waits for engines: at first, and later. Idle gaps are short, but each read takes
processor time, on a CPU from serving itself: every 2 ms took a twelfth of a core."""
_SPARE_TICK_S, _LOOK_S, _RECENT_S = 0.005, 0.02, 5.0
"""Where it may work beside requests: time between questions whether it may now, and between looks at the engines' steps; and
for how long it then counts as working."""


class Yielding:
    """The trainer's turns on its device. All times are in seconds of `monotonic`.

    Args:
        engines_dir: has the engines' folders, each with its page.
        meanwhile: is called again and again while a unit waits amid its work, with the seconds that it may wait; an exception
            from it ends the unit.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        engines_dir: Path,
        meanwhile: Callable[[float], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic, self._meanwhile, self._max_duty = monotonic, meanwhile, settings.max_duty
        self._is_yielding = settings.when != "always"
        self._yield_points = YieldPoints(self._stand_by)
        self._computed_s = monotonic
        """Clock of computed time. On a GPU, queued work is always computed to its end."""
        self._computed_before_s = 0.0  # last read of the flags that found no work
        self._unit_began_s = self._stood_by_s = self._rests_until_s = 0.0
        self.is_paused = self._was_working = False
        others = settings.other_engines_dirs(engines_dir)
        self.busy = BusyFlags(engines_dir, settings.yields_to, others) if self._is_yielding else BusyFlags(engines_dir, ())
        self.spare = SpareTime(settings.latency_budget, settings.p99_budget) if settings.when == "spare" else None
        self.idleness, self.preemptions = Idleness(), Preemptions()
        self._beside_since_s: float | None = None
        """Since when the unit under way has run beside requests."""
        self._beside_until_s = -math.inf
        """When the last one ended."""
        self._next_look_s = 0.0

    def look(self) -> bool:
        """Read the engines' pages; return whether one of them has work."""
        is_busy = self.busy.is_busy()
        self.idleness.observe(is_busy, self._monotonic())
        self._take_steps()
        if not is_busy:
            self._note_idle()
        return is_busy

    def may_begin(self, is_busy: bool) -> bool:
        """Return whether a unit may begin now, `is_busy` being what `look` has just found."""
        is_resting = self._rest_s() > 0.0
        if self.is_paused or (is_busy and (is_resting or not self._may_work_beside())):
            if is_busy and self._was_working:
                self.preemptions.observe(0.0, 0.0)  # it came between two units
            self._was_working = False
            return False
        return not is_resting

    @contextlib.contextmanager
    def unit(self, device: torch.device | None) -> Iterator[None]:
        """A unit of work on this device: it yields amid it where that is possible, and sets the rest after it.

        Args:
            device: None: a light unit, which needs neither.
        """
        needs_device = self._was_working = device is not None
        stops_amid_unit = self._is_yielding and device is not None and device.type == "cpu"
        self._computed_s = time.process_time if stops_amid_unit else self._monotonic
        self._unit_began_s, began_s = self._monotonic(), self.working_s()
        self._computed_before_s = self._computed_s()
        with self._yield_points if stops_amid_unit else contextlib.nullcontext():
            yield
        if needs_device:
            worked_s = self.working_s() - began_s
            self._rests_until_s = self._monotonic() + worked_s * (1.0 / self._max_duty - 1.0)
            if self._was_beside():
                self._was_working = False
            elif self.busy.is_busy():
                self._yielded()

    def wait_s(self, most_s: float) -> float:
        """Time until it is worth asking again whether a unit may begin; at most `most_s` where no engine has work."""
        return self._busy_wait_s() if self.busy.is_busy() else min(self._rest_s(), most_s)

    def worked_lately(self) -> bool:
        """Return whether training has run beside requests in the last seconds."""
        return self._monotonic() - self._beside_until_s <= _RECENT_S

    def working_s(self) -> float:
        """Clock that stands still while a unit waits for engines."""
        return self._monotonic() - self._stood_by_s

    def _stand_by(self) -> None:
        """Wait in the middle of a unit until it may go on."""
        was_beside = self._was_beside()
        if not self.busy.is_busy():
            self._computed_before_s = self._computed_s()
            self._note_idle()
            return
        if self._take_steps():
            self._meanwhile(0.0)
        if not self.is_paused and self._may_work_beside():
            return
        if not was_beside:
            self._yielded()
        began_s = self._monotonic()
        while self.is_paused or (self.busy.is_busy() and not self._may_work_beside()):
            self._meanwhile(self._busy_wait_s())
            self._take_steps()
            self.idleness.observe(is_busy=True, now_s=self._monotonic())
        self._stood_by_s += self._monotonic() - began_s
        self._computed_before_s = self._computed_s()
        self._was_working = True

    def _yielded(self) -> None:
        """Record that the trainer has stopped for work that arrived during a unit."""
        # Unknown time (0): assume that the flag was raised at the very beginning of the unit.
        delay_s = self._monotonic() - max(self._unit_began_s, self.busy.raised_s)
        self.preemptions.observe(delay_s, self._computed_s() - self._computed_before_s)
        self._was_working = False

    def _take_steps(self) -> bool:
        """Take in the engines' steps, now and then; return whether it was time to."""
        now_s = self._monotonic()
        if self.spare is None or now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + _LOOK_S
        self.spare.observe(self.busy.new_steps(), now_s)
        return True

    def _may_work_beside(self) -> bool:
        """Return whether a unit may begin, or go on, beside the engines' requests; it is paid for from now on."""
        now_s = self._monotonic()
        if self.spare is None or not self.spare.may_work(now_s, self.busy.busy_engines):
            return False
        self._beside_since_s = now_s
        return True

    def _was_beside(self) -> bool:
        """Pay for the time beside requests so far; return whether there was any."""
        if self._beside_since_s is None or self.spare is None:
            return False
        self._beside_until_s = self._monotonic()
        self.spare.worked(self._beside_since_s, self._beside_until_s)
        self._beside_since_s = None
        return True

    def _note_idle(self) -> None:
        if self.spare is not None:
            self.spare.idle(self._monotonic())

    def _rest_s(self) -> float:
        """Remaining rest that the last unit requires."""
        return max(self._rests_until_s - self._monotonic(), 0.0)

    def _busy_wait_s(self) -> float:
        """Time until the next read of the flags: an eighth of how long there has been work."""
        if self.spare is not None and self.spare.meter.is_on:
            return _SPARE_TICK_S
        least_s, most_s = _BUSY_TICKS_S
        return min(max((self._monotonic() - self.busy.raised_s) / 8.0, least_s), most_s)
