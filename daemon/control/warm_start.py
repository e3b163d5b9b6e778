"""What a daemon or an engine that was started again still knows: the controller learns from the end of the stored log.

Without it every restart would explore anew, with fixed lengths until step times are known. Only boots count in which the same
target, drafter and engine settings ran under the same engine id; what has changed in the meantime (another GPU, other clocks)
is noticed as it is while running.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from honed.adapt.control.controller import EngineController
from honed.adapt.protocol.wire import EngineHello
from honed.daemon.store.batch_tables import read_frame
from honed.daemon.store.database import connect

MOST_BATCHES = 400
"""A busy engine fills four in a second."""
ALIKE = ("model_name", "target_path", "drafter_path", "method", "runner", "vllm_version", "num_spec_tokens", "max_num_seqs")
"""What has to be as it was, of that which an engine says of itself."""

_BOOTS = "SELECT boot_id, hello FROM boots WHERE engine_id = ? AND hello IS NOT NULL"
_NEWEST = """
SELECT boot_id, frame FROM
  (SELECT id, boot_id, frame FROM batches WHERE engine_id = ? AND NOT malformed ORDER BY id DESC LIMIT ?) ORDER BY id
"""


def recall(database: Path, hello: EngineHello, controller: EngineController) -> int:
    """Let a new controller learn from what is stored of its engine; from how many batches it could.

    Raises pysqlite3.Error when the database can't be read.
    """
    learned = 0
    connection = connect(database, read_only=True)
    try:
        said = connection.conn.execute(_BOOTS, [hello.engine_id]).fetchall()
        rows = connection.conn.execute(_NEWEST, (hello.engine_id, MOST_BATCHES)).fetchall()
    finally:
        connection.close()
    boots = {boot for boot, text in said if _is_alike(msgspec.json.decode(text, type=EngineHello), hello)} | {hello.boot_id}
    for boot_id, frame in rows:
        batch = read_frame(frame) if boot_id in boots else None
        if batch is None:
            continue
        try:
            controller.observe(batch)  # its alarms stand already, see `drift_alarms`
        except ValueError:
            continue
        learned += 1
    return learned


def _is_alike(one: EngineHello, other: EngineHello) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ALIKE)
