"""Events against a list of everything that can be restored, kept by hand."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from longlane.memory.events import BlockRemoved, BlockStored, Ledger

DEPTH = 4
tiers = st.sampled_from(["device", "host", "disk"])


def test_a_page_without_a_state_is_nobody_s_news():
    told = []
    ledger = Ledger(told.append)
    ledger.put("device", b"a", b"", b"aaaa")
    assert told == []
    ledger.stand([b"a"])
    ledger.put("host", b"a", b"", b"aaaa")
    ledger.take("device", b"a")
    ledger.fall([b"a"])
    ledger.take("host", b"a")
    assert told == [
        BlockStored(b"a", b"", b"aaaa", "device"),
        BlockStored(b"a", b"", b"aaaa", "host"),
        BlockRemoved(b"a", b"", b"aaaa", "device"),
        BlockRemoved(b"a", b"", b"aaaa", "host"),
    ]


class Believer(RuleBasedStateMachine):
    """Blocks of one chain come and go, states too; who only hears events knows what can be continued from."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.hear)
        self.there: set[tuple[str, int]] = set()
        self.states: list[int] = []
        self.known: set[tuple[str, bytes]] = set()

    def hear(self, event):
        assert event.parent == (bytes([event.digest[0] - 1]) if event.digest[0] else b"")
        assert event.tokens == event.digest * 4
        block = event.tier, event.digest
        assert (block in self.known) == isinstance(event, BlockRemoved)
        self.known ^= {block}

    @rule(tier=tiers, block=st.integers(0, DEPTH - 1))
    def move(self, tier, block):
        digest = bytes([block])
        if (tier, block) in self.there:
            self.ledger.take(tier, digest)
        else:
            self.ledger.put(tier, digest, bytes([block - 1]) if block else b"", digest * 4)
        self.there ^= {(tier, block)}

    @rule(depth=st.integers(1, DEPTH))
    def stand(self, depth):
        self.states.append(depth)
        self.ledger.stand(bytes([block]) for block in range(depth))

    @rule(data=st.data())
    def fall(self, data):
        if self.states:
            depth = self.states.pop(data.draw(st.integers(0, len(self.states) - 1)))
            self.ledger.fall(bytes([block]) for block in range(depth))

    @invariant()
    def informed(self):
        reach = max(self.states, default=0)
        assert self.known == {(tier, bytes([block])) for tier, block in self.there if block < reach}


TestBeliever = Believer.TestCase
TestBeliever.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
