"""Connected engines that can do a request, or the reason why none can."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from honed.daemon.errors import ConflictError, UnknownError, there_are
from honed.daemon.ingest.engines import Engine, Engines
from honed.daemon.lifecycle.swaps import Swaps
from honed.daemon.store.rollups import RESOLUTIONS_S
from honed.daemon.store.store import Store

ATTACH = "`honed engines` lists them; a vLLM attaches if it is started with what `honed vllm-args` prints."

UNTRAINED = "docs/training.md lists drafters that are trained; lengths are tuned whatever the drafter."

TAKE_BACK = "`honed promote VERSION --force` lets honed swap it again; until then honed only watches."


class EligibleEngines:
    """Picks engines, and says why there is none. Guarded by the service's lock.

    Args:
        live_workloads: returns engine id and workload pairs with rounds since the daemon started.
    """

    def __init__(
        self,
        engines: Engines,
        swaps: Swaps,
        store: Store,
        live_workloads: Callable[[], set[tuple[str, str]]],
        monotonic: Callable[[], float],
    ) -> None:
        self._engines, self._swaps, self._store = engines, swaps, store
        self._live_workloads, self._monotonic = live_workloads, monotonic

    def connected(self) -> list[Engine]:
        """Connected engines."""
        return self._engines.connected(self._monotonic())

    def swappable(self, *versions: str, takes_over: bool = False) -> list[Engine]:
        """Engines that can take each of these versions, see `Swaps.fits`."""
        fits = self._swaps.fits
        return [one for one in self.connected() if all(fits(one, version, takes_over=takes_over) for version in versions)]

    def capturing(self, engine_id: str = "") -> Engine:
        """The named engine, else the one with most samples. Raises UnknownError, ConflictError."""
        found = self.connected()
        if engine_id:
            self._engines.get(engine_id)
            found = [engine for engine in found if engine.engine_id == engine_id]
        if not found:
            why = f"engine {engine_id!r} is not connected; {there_are(e.engine_id for e in self.connected())}"
            raise ConflictError(why if engine_id else "no engine is connected", cure=ATTACH)
        able = [engine for engine in found if engine.hello is not None and engine.hello.capture_path]
        reasons = [engine.hello.untrained if engine.hello is not None else [] for engine in found]
        if not able and all(reasons):
            named = "; ".join(dict.fromkeys(why for each in reasons for why in each))
            raise ConflictError(f"no connected engine has a drafter that can be trained: {named}", cure=UNTRAINED)
        if not able:
            raise ConflictError(
                "; ".join(["no connected engine captures samples", *limits(found)]),
                cure="`honed engines` shows what each can do; HONED_CAPTURE=0 in vLLM's environment disables capturing.",
            )
        if not (able := [engine for engine in able if not engine.has_foreign_drafter]):
            raise ConflictError("; ".join(["no drafter to start from", *limits(found)]), cure=TAKE_BACK)
        return max(able, key=lambda engine: engine.status.captured_rows if engine.status else 0)

    def replicas(self, engine: Engine, version: str) -> list[Engine]:
        """The given engine, and the others whose samples can be learned from together with its own."""
        found = [engine]
        for other in self.connected():
            if other is engine or other.hello is None or not other.hello.capture_path or other.has_foreign_drafter:
                continue
            is_alike = engine.hello is not None and other.hello.features == engine.hello.features
            if is_alike and self._swaps.fits(other, version, awake=False):
                found.append(other)
        return found

    def stored_workloads(self) -> set[tuple[str, str]]:
        """Engine id and workload pairs that have stored rounds. It reads many rows: call it without the lock."""
        rows = self._store.scan("SELECT DISTINCT engine_id, workload FROM rollups WHERE resolution_s = ?", (RESOLUTIONS_S[-1],))
        return {(row["engine_id"], row["workload"]) for row in rows}

    def check_workloads(self, engine: Engine, workloads: Iterable[str], stored: set[tuple[str, str]]) -> None:
        """Raise UnknownError if the engine never had a round of one of them: waiting for its samples would be useless.

        Args:
            stored: of `stored_workloads`.
        """
        seen = {workload for engine_id, workload in self._live_workloads() | stored if engine_id == engine.engine_id}
        for workload in workloads:
            if workload not in seen:
                raise UnknownError(
                    f"engine {engine.engine_id} has never had a round of workload {workload!r}; {there_are(sorted(seen))}",
                    cure="`honed workloads` lists them; requests set it as `honed_workload` in vllm_xargs.",
                )

    def why_none(self, *versions: str) -> str:
        """Reason why no engine can take each of these versions."""
        found = self.connected()
        if not found:
            return "no engine is connected"
        return "; ".join([f"no connected engine can take {' and '.join(versions)}", *limits(found)])


def limits(engines: list[Engine]) -> list[str]:
    """Limits reported by the engines themselves."""
    said = [limit for engine in engines if engine.hello is not None for limit in engine.hello.limits]
    said += [f"engine {engine.engine_id} sleeps (vLLM's sleep mode)" for engine in engines if engine.is_asleep]
    return said + [foreign(engine) for engine in engines if engine.has_foreign_drafter]


def foreign(engine: Engine) -> str:
    """Reason why honed may not change an engine's drafter."""
    return f"the drafter of engine {engine.engine_id} got its weights through vLLM's own endpoint, not from honed"
