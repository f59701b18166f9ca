"""vLLM's real tiering over a real server, with faults in any order: rows have the right bytes,
nothing waits for ever."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotkv_vllm.offloading import transfers
from tests.offloading.rig import Rig, keys_of
from tests.support.waiting import stop, wait_for
from tests.vllm.processes import Daemon

pytestmark = pytest.mark.examples
"""An example takes ten seconds: a sixth of the profile's."""

PROMPTS = {name: keys_of(name, count) for name, count in (("a", 6), ("b", 30), ("c", 90))}
NUM_ROWS = 40
QUICK = {
    "hotkv.store_timeout_s": 0.2,
    "hotkv.load_timeout_s": 0.5,
    "hotkv.reset_timeout_s": 0.2,
    "hotkv.startup_wait_s": 0.2,
    "hotkv.lookup_timeout_s": 0.2,
}


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(transfers, "CANCEL_GRACE_S", 0.1)
        self.folder = tempfile.TemporaryDirectory(prefix="hotkv-door-")
        self.server = Daemon(Path(self.folder.name)).start()
        self.is_stopped = False
        self.is_dead = False
        self.engines = [Rig(self.server.target, num_rows=NUM_ROWS, **QUICK) for _ in range(2)]
        self.asking = [{} for _ in self.engines]
        """Unanswered lookups by engine and request id."""

    engines_of = st.integers(0, 1)
    prompts = st.sampled_from(sorted(PROMPTS))

    @rule(engine=engines_of, prompt=prompts)
    def compute(self, engine, prompt):
        rig = self.engines[engine]
        context = rig.request(PROMPTS[prompt])
        rig.offer(context, PROMPTS[prompt][: NUM_ROWS // 2])
        rig.manager.on_request_finished(context)

    @rule(engine=engines_of, prompt=prompts)
    def ask(self, engine, prompt):
        context = self.engines[engine].request(PROMPTS[prompt])
        self.asking[engine][context.req_id] = (context, PROMPTS[prompt])

    @rule(engine=engines_of, count=st.integers(1, 5))
    def steps(self, engine, count):
        rig = self.engines[engine]
        for _ in range(count):
            for name, (context, keys) in list(self.asking[engine].items()):
                hits = rig.lookup_once(context, keys)
                if hits is not None:
                    rig.load(context, keys[:hits])
                    del self.asking[engine][name]
            rig.step()

    @rule(engine=engines_of)
    def abort(self, engine):
        for context, _ in self.asking[engine].values():
            self.engines[engine].manager.on_request_finished(context)
        self.asking[engine].clear()

    @rule(engine=engines_of)
    def reset(self, engine):
        self.engines[engine].manager.reset_cache()

    @precondition(lambda self: not (self.is_stopped or self.is_dead))
    @rule(engine=engines_of)
    def flush(self, engine):
        session = self.engines[engine].tier.session
        if session is not None and session.connected:
            session.flush()

    @precondition(lambda self: not (self.is_stopped or self.is_dead))
    @rule()
    def stop(self):
        stop(self.server.pid)
        self.is_stopped = True

    @precondition(lambda self: self.is_stopped)
    @rule()
    def go_on(self):
        os.kill(self.server.pid, signal.SIGCONT)
        self.is_stopped = False

    @precondition(lambda self: not self.is_dead)
    @rule()
    def kill(self):
        self.server.kill()
        self.is_dead, self.is_stopped = True, False

    @precondition(lambda self: self.is_dead)
    @rule()
    def restart(self):
        self.server.start()
        self.is_dead = False

    @invariant()
    def rooms_agree(self):
        for rig in self.engines:
            rig.tier._room.check_invariants()

    def teardown(self):
        """All lookups and transfers must end."""
        if self.is_stopped:
            self.go_on()
        if self.is_dead:
            self.restart()
        for place, rig in enumerate(self.engines):
            for context, keys in self.asking[place].values():
                rig.load(context, keys[: rig.lookup(context, keys)])
            wait_for(lambda rig=rig: rig.step() or not rig.tier._rows.num_held)
            rig.close()
        self.patch.undo()
        self.server.stop()
        self.folder.cleanup()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=max(2, settings.default.max_examples // 6), stateful_step_count=25
)
