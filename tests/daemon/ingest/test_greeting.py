"""An engine is welcome once it is known which registered version it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from honed.adapt.protocol import wire
from honed.daemon.ingest.engines import Engine, Engines
from honed.daemon.ingest.greeting import READABLE, Greeting
from honed.daemon.store.store import Store
from honed.recalib.registry.access import User
from honed.recalib.registry.registry import RegistryError
from tests.daemon.conftest import Clock


class Host:
    """A greeting whose background work waits for `work`."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.engines = Engines(store, lost_after_s=10.0)
        self.identify: Callable[[wire.EngineHello], str] = lambda hello: "v0001-abc"
        self.users = {b"peer": User(1000, 1000)}
        """Users of the connected processes."""
        self.asked: list[User | None] = []
        """Users for whom a checkpoint was read."""
        self.sent: list[wire.Welcome] = []
        self.calls: list[str] = []
        self.learned: list[str] = []
        self.unreadable: set[str] = set()
        """Targets that can't be read."""
        self.removed: set[str] = set()
        self._jobs: list[Callable[[], None]] = []
        self.greeting = Greeting(
            store,
            lambda peer, message: self.sent.append(message),
            daemon_id="daemon",
            log_token_ids=True,
            clock=clock,
            lock=threading.RLock(),
            in_background=lambda job, touches: self._jobs.append(job),
            user_of=self.users.get,
            identify=self._identify,
            is_kept=lambda version: version not in self.removed,
            learn_target=self._learn_target,
            on_hello=lambda engine, hello: self.calls.append("hello"),
            on_welcome=lambda engine: self.calls.append("welcome"),
            keep=self.engines.keep,
        )

    def _identify(self, hello: wire.EngineHello, user: User | None) -> str:
        self.asked.append(user)
        return self.identify(hello)

    def _learn_target(self, target_path: str) -> bool:
        self.learned.append(target_path)
        return target_path not in self.unreadable

    def tick(self, now_s: float) -> None:
        self.greeting.tick(list(self.engines.by_id.values()), now_s)
        self.work()

    def greet(self, version: str = "", drafter_path: str = "/drafter", method: str = "dflash") -> Engine:
        fields: dict[str, Any] = dict.fromkeys(("model_name", "vllm_version", "honed_version", "runner"), "")
        fields |= {"target_path": "/models/tiny", "drafter_path": drafter_path, "method": method}
        fields |= {"wire_version": wire.WIRE_VERSION, "num_spec_tokens": 3, "max_num_seqs": 8}
        hello = wire.EngineHello(engine_id="engine-0", boot_id="boot", drafter_version=version, **fields)
        engine = self.engines.introduce(hello, b"peer", 0.0)
        assert engine is not None
        self.greeting.greet(engine)
        return engine

    def work(self) -> None:
        while self._jobs:
            self._jobs.pop(0)()


@pytest.fixture
def host(store: Store, clock: Clock) -> Host:
    return Host(store, clock)


def test_an_engine_that_names_its_version_is_welcome_at_once(host: Host, store: Store) -> None:
    engine = host.greet("v0007-fed")
    (welcome,) = host.sent
    assert (welcome.daemon_id, welcome.boot_id, welcome.committed_seq) == ("daemon", "boot", 0)
    assert (welcome.drafter_version, welcome.log_token_ids) == ("v0007-fed", True)
    assert host.calls == ["hello", "welcome"]
    host.work()
    assert host.learned == ["/models/tiny"], "it isn't read while the engine waits"
    assert engine.policy_sent_s == float("-inf"), "it gets a policy anew"
    assert store.drain(10)
    assert store.read("SELECT hello FROM boots")[0]["hello"].startswith('{"type":"EngineHello"')


@pytest.mark.parametrize(("path", "method"), [("", "ngram"), ("/models/small", "draft_model"), ("", "dflash")])
def test_an_engine_without_a_drafter_that_is_trained_is_welcome_at_once(host: Host, path: str, method: str) -> None:
    """While its target was read, its queue filled; on a mount that hung it was never welcome, and all its rounds were lost."""
    host.unreadable.add("/models/tiny")
    engine = host.greet(drafter_path=path, method=method)
    assert [welcome.drafter_version for welcome in host.sent] == [""]
    assert host.learned == []
    host.work()
    host.unreadable.clear()
    host.tick(100.0)
    assert host.learned == ["/models/tiny"] * 2
    assert (len(host.sent), host.asked, engine.drafter_note) == (1, [], "")


def test_an_engine_is_welcome_before_its_target_is_read(host: Host) -> None:
    sent = list[int]()
    host.greeting._learn_target = lambda path: (sent.append(len(host.sent)), True)[1]
    host.greet()
    host.work()
    assert sent == [1]


@pytest.mark.fault("an engine that names a version of a registry that is gone")
def test_an_engine_that_names_a_version_that_is_not_kept_is_looked_for(host: Host) -> None:
    """After the state folder was lost it had no version, and none was active, until vLLM was started again."""
    host.removed.add("v0007-fed")
    engine = host.greet("v0007-fed")
    assert host.sent == []
    host.work()
    assert [welcome.drafter_version for welcome in host.sent] == ["v0001-abc"]
    assert engine.live_version == engine.boot.own_version == "v0001-abc"


@pytest.mark.parametrize("version", [wire.LOST_DRAFTER, wire.FOREIGN_DRAFTER])
def test_an_engine_whose_weights_are_no_version_is_welcome_at_once(host: Host, version: str) -> None:
    host.removed.add(version)
    assert host.greet(version).live_version == version
    assert [welcome.drafter_version for welcome in host.sent] == [version]


def test_another_one_waits_until_its_checkpoint_was_read(host: Host) -> None:
    engine = host.greet()
    assert (host.sent, host.calls) == ([], ["hello"])
    host.work()
    assert [welcome.drafter_version for welcome in host.sent] == ["v0001-abc"]
    assert engine.live_version == engine.boot.own_version == "v0001-abc"


def test_its_checkpoint_is_read_for_its_user_even_if_it_has_hung_up_by_then(host: Host) -> None:
    """A process once had its user forgotten by ending, and the daemon copied for it what only the daemon could read."""
    host.greet()
    host.users.clear()
    host.work()
    assert host.asked == [User(1000, 1000)]


def test_the_version_it_came_with_is_known_after_a_restart_of_the_daemon(host: Host, store: Store, clock: Clock) -> None:
    host.greet()
    host.work()
    assert store.drain(10)
    again = Host(store, clock).greet("v0007-fed")  # what it runs by then
    assert (again.live_version, again.boot.own_version) == ("v0007-fed", "v0001-abc")


@pytest.mark.fault("a checkpoint read again at every hello")
def test_an_engine_that_says_hello_every_second_meanwhile_is_looked_for_once(host: Host) -> None:
    looked: list[wire.EngineHello] = []
    identify = host.identify

    def count(hello: wire.EngineHello) -> str:
        looked.append(hello)
        return identify(hello)

    host.identify = count
    for _ in range(5):
        host.greet()
    host.work()
    assert len(looked) == len(host.sent) == 1


def test_what_it_was_started_with_last_counts(host: Host) -> None:
    """Files of its earlier start may be read for longer than those of its latest."""
    versions = {"/old": "v0001-abc", "/new": "v0002-def"}

    def identify(hello: wire.EngineHello) -> str:
        if hello.drafter_path == "/old":
            host.greet(drafter_path="/new")
        return versions[hello.drafter_path]

    host.identify = identify
    engine = host.greet(drafter_path="/old")
    host.work()
    assert [welcome.drafter_version for welcome in host.sent] == ["v0002-def"]
    assert engine.boot.own_version == "v0002-def"


def test_a_version_that_was_removed_once_it_was_found_is_looked_for_again(host: Host) -> None:
    versions = iter(["v0001-abc", "v0002-abc"])
    host.identify = lambda hello: next(versions)
    host.removed.add("v0001-abc")
    host.greet()
    host.work()
    assert [welcome.drafter_version for welcome in host.sent] == ["v0002-abc"]


def test_what_it_said_it_runs_meanwhile_counts(host: Host) -> None:
    engine = host.greet()
    engine.live_version = wire.FOREIGN_DRAFTER
    host.work()
    assert [welcome.drafter_version for welcome in host.sent] == [wire.FOREIGN_DRAFTER]


UNREAD = RegistryError("no such folder")
UNREAD.__cause__ = FileNotFoundError()


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (UNREAD, f"its drafter can't be retrained: no such folder; {READABLE}"),
        (RegistryError("holds no drafter"), "its drafter can't be retrained: holds no drafter"),
        (ZeroDivisionError("a bug"), ""),
    ],
)
def test_an_engine_whose_drafter_cannot_be_read_is_welcome_all_the_same(host: Host, error: Exception, note: str) -> None:
    def fail(hello: wire.EngineHello) -> str:
        raise error

    host.identify = fail
    engine = host.greet()
    host.work()
    assert [welcome.drafter_version for welcome in host.sent] == [""]
    assert engine.drafter_note == note


@pytest.mark.fault("a drafter that couldn't be read once is never looked at again")
def test_an_engine_whose_drafter_cannot_be_read_yet_is_looked_at_again(host: Host) -> None:
    """After a full disk or a mount that came late, nothing was retrained until vLLM or the daemon was started again."""
    errors = [UNREAD, RegistryError("No space left on device"), RegistryError("No space left on device")]

    def identify(hello: wire.EngineHello) -> str:
        if errors:
            raise errors.pop(0)
        return "v0001-abc"

    host.identify = identify
    engine = host.greet()
    host.work()
    host.tick(100.0)
    assert engine.drafter_note == "its drafter can't be retrained: No space left on device"
    for now_s in (101.0, 109.0):
        host.tick(now_s)
    assert len(errors) == 1, "not again at once"
    host.tick(110.0)
    host.tick(129.0)
    assert len(host.sent) == 1, "what brings no news is no welcome"
    host.tick(130.0)
    assert [welcome.drafter_version for welcome in host.sent] == ["", "v0001-abc"]
    assert (engine.live_version, engine.boot.own_version, engine.drafter_note) == ("v0001-abc", "v0001-abc", "")
    for now_s in (1e4, 2e4):
        host.tick(now_s)
    assert len(host.sent) == 2
    assert len(host.asked) == 4, "it is read no more"


def test_a_target_that_cannot_be_read_yet_is_read_again_while_the_engine_is_served(host: Host) -> None:
    host.unreadable.add("/models/tiny")
    host.greet()
    host.work()
    host.tick(100.0)
    host.unreadable.clear()
    host.tick(110.0)
    assert len(host.learned) == 3
    host.tick(1e4)
    assert len(host.learned) == 3
    assert [welcome.drafter_version for welcome in host.sent] == ["v0001-abc"]
    assert len(host.asked) == 1
