"""Tests access control without a server."""

import hashlib
import os
import socket
import stat
import struct
from pathlib import Path
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.security import identity, path_checks
from hotkv_server.security.identity import (
    TTL_S,
    AccessControl,
    Peer,
    Proofs,
    Tenant,
    Tickets,
    digest_of,
)
from hotkv_server.settings import load_settings
from hotkv_server.wire.guard import peers as peers_module

TOKENS = ("", "t1", "t2", "\u00fc")
NAMES = ("", "spiffe://one", "two")
small = st.integers(-1, 3)
peers = st.builds(
    Peer,
    uid=small,
    gids=st.frozensets(st.integers(0, 3), max_size=2),
    token_digest=st.sampled_from(TOKENS).map(digest_of),
    certificate_names=st.frozensets(st.sampled_from(NAMES[1:])),
)


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


proofs = st.builds(
    Proofs,
    uids=st.frozensets(st.integers(0, 3), max_size=2),
    gids=st.frozensets(st.integers(0, 3), max_size=2),
    token_digests=st.frozensets(st.sampled_from([digest(t) for t in TOKENS]), max_size=2),
    certificate_names=st.frozensets(st.sampled_from(NAMES), max_size=2),
)


@given(
    peers,
    st.dictionaries(st.sampled_from(["", "a", "b"]), proofs),
    st.sampled_from(["", "a", "b", "c"]),
)
def test_peer_acts_for_proven_tenants_only(
    peer: Peer, known: dict[str, Proofs], wanted: str
) -> None:
    gate = AccessControl({name: Tenant(name, proof) for name, proof in known.items()})

    def naive(name: str) -> bool:
        if name not in known:
            return False
        listed = known[name]
        by_user = peer.uid >= 0 and (peer.uid in listed.uids or bool(listed.gids & peer.gids))
        return (
            by_user
            or (peer.token_digest != b"" and peer.token_digest in listed.token_digests)
            or bool(listed.certificate_names & peer.certificate_names)
        )

    assert gate.may_link(peer) == any(map(naive, known))
    if not known:
        assert gate.is_open and gate.admit(peer, wanted) is None
        return
    if naive(wanted):
        admitted = gate.admit(peer, wanted)
        assert admitted is not None and admitted.name == wanted
        return
    with pytest.raises(HotKVError) as caught:
        gate.admit(peer, wanted)
    assert caught.value.reason is (Reason.NOT_ALLOWED if peer.has_proof else Reason.UNAUTHENTICATED)


def test_refusal_hides_whether_a_tenant_exists() -> None:
    one, two = (Tenant(name, Proofs(uids=frozenset({uid}))) for name, uid in (("a", 1), ("b", 2)))
    gate, texts = AccessControl({"a": one, "b": two}), []
    for name in ("b", "c"):
        with pytest.raises(HotKVError) as caught:
            gate.admit(Peer(uid=1), name)
        texts.append(caught.value.message.replace(repr(name), "…"))
    assert texts[0] == texts[1]


def test_a_peer_does_not_show_its_token() -> None:
    peer = Peer("x", token_digest=digest_of("secret"), certificate_names=frozenset({"me"}))
    assert "secret" not in repr(peer) + str(peer)
    assert not any(getattr(peer, name) == "secret" for name in Peer.__slots__)
    assert Proofs(token_digests=frozenset({digest_of("secret")})).match(peer)
    assert not Proofs(token_digests=frozenset({digest_of("")})).match(Peer())


class TicketMachine(RuleBasedStateMachine):
    """Tickets against a list of (ticket, uid, expiry). Three users can reach MAX_TICKETS."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(identity, "MAX_TICKETS", 2 * identity.MAX_TICKETS_OF_USER)
        numbers = iter(range(1 << 30))
        self.tickets = Tickets(lambda: next(numbers).to_bytes(16, "big"))
        self.model: list[tuple[bytes, int, float]] = []
        self.used: list[bytes] = []
        self.now_s = 0.0

    def teardown(self) -> None:
        self.patch.undo()

    def _live(self) -> list[tuple[bytes, int, float]]:
        return [entry for entry in self.model if entry[2] > self.now_s]

    @rule(uid=st.integers(0, 2), times=st.sampled_from([1, 3, 400]))
    def issue(self, uid: int, times: int) -> None:
        for _ in range(times):
            live = self._live()
            full = (
                sum(u == uid for _, u, _ in live) >= identity.MAX_TICKETS_OF_USER
                or len(live) >= identity.MAX_TICKETS
            )
            if full:
                with pytest.raises(HotKVError) as caught:
                    self.tickets.issue(Peer(uid=uid), self.now_s)
                assert caught.value.reason is Reason.OVERLOADED
                return
            self.model.append(
                (self.tickets.issue(Peer(uid=uid), self.now_s), uid, self.now_s + TTL_S)
            )

    @rule(seconds=st.sampled_from([0.5, 4.0, TTL_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(data=st.data())
    def redeem(self, data: st.DataObject) -> None:
        known = [ticket for ticket, _, _ in self.model[-20:]]
        at = data.draw(st.integers(0, len(known)))
        self._redeem(known[at] if at < len(known) else b"guess")

    @rule(back=st.integers(1, 3))
    def redeem_again(self, back: int) -> None:
        self._redeem(self.used[-back] if back <= len(self.used) else b"")

    def _redeem(self, ticket: bytes) -> None:
        found = next((uid for t, uid, _ in self._live() if t == ticket), None)
        peer = self.tickets.redeem(ticket, self.now_s)
        assert (peer.uid if peer else None) == found
        self.model = [entry for entry in self.model if entry[0] != ticket]
        self.used.append(ticket)

    @invariant()
    def holds(self) -> None:
        self.tickets.check_invariants()


TestTickets = TicketMachine.TestCase


def test_ids_of_users_and_groups_have_32_bits() -> None:
    ids = {
        socket.SO_PEERCRED: struct.pack("iII", 7, (1 << 32) - 2, 1 << 31),
        peers_module.SO_PEERGROUPS: struct.pack("II", 5, 3 << 30),
    }
    peer = peers_module.of_socket(Mock(getsockopt=lambda level, name, size: ids[name]))
    assert (peer.uid, peer.gids) == ((1 << 32) - 2, {1 << 31, 5, 3 << 30})


# Files


def unsafe(call: object, *arguments: object, **more: object) -> str:
    with pytest.raises(path_checks.UnsafeError) as caught:
        call(*arguments, **more)  # type: ignore[operator]
    return str(caught.value)


def test_directories_become_private_open_ones_are_refused(tmp_path: Path) -> None:
    run, arena = tmp_path / "run", tmp_path / "arena"
    path_checks.check_shared_dir(run)
    path_checks.check_own_dir(arena, is_private=True)
    assert (stat.S_IMODE(run.stat().st_mode), stat.S_IMODE(arena.stat().st_mode)) == (0o755, 0o700)
    for mode in (0o777, 0o775, 0o1777, 0o757):
        run.chmod(mode)
        assert f"chmod go-w {run}" in unsafe(path_checks.check_shared_dir, run)
    for mode in (0o755, 0o701, 0o770):
        arena.chmod(mode)
        assert f"chmod 700 {arena}" in unsafe(path_checks.check_own_dir, arena, is_private=False)
    arena.chmod(0o750)
    path_checks.check_own_dir(arena, is_private=False)
    assert "its group or others" in unsafe(path_checks.check_own_dir, arena, is_private=True)
    (tmp_path / "file").touch()
    assert "no directory" in unsafe(path_checks.check_shared_dir, tmp_path / "file")


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a directory away")
def test_other_peoples_directories_are_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 4242, 4242)
    assert "belongs to user id 4242" in unsafe(path_checks.check_shared_dir, theirs)
    assert "belongs to user id 4242" in unsafe(path_checks.check_own_dir, theirs, is_private=False)
    (tmp_path / "mine").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    path_checks.check_shared_dir(link)
    os.chown(link, 4242, 4242, follow_symlinks=False)
    assert "symbolic link of user id 4242" in unsafe(path_checks.check_shared_dir, link)


def test_only_sockets_and_files_of_ours_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        path_checks.check_sockets([tmp_path / "socket", tmp_path / "missing"])
        path_checks.check_files([tmp_path / "target", tmp_path / "missing"])
        for name in ("link", "dangling", "pipe", "target"):
            assert "not a socket of this server" in unsafe(
                path_checks.check_sockets, [tmp_path / name]
            )
        for name in ("link", "dangling", "pipe", "socket"):
            assert "not a regular file of this server" in unsafe(
                path_checks.check_files, [tmp_path / name]
            )


def test_a_key_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    key.chmod(0o640)
    path_checks.check_secret(key)
    key.chmod(0o644)
    assert f"chmod o-rwx {key}" in unsafe(path_checks.check_secret, key)


# Settings


TCP = 'tcp_address = "host:1"\n'
TLS = '[security.tls]\ncertificate = "/c"\nkey = "/k"'
ONE = '[[security.tenants]]\nname = "a"\nuids = [1]\n'
NAMES_OF_TOPICS = "may name {node}, {pool}, {model}, {tenant}, {key_space} in braces"
NO_PROOF = '[[security.tenants]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NO_PROOF, "security.tenants.0: must list at least one of uids"),
        ('[[security.tenants]]\nname = "a/b"\nuids = [1]', "security.tenants.0.name"),
        (f"{NO_PROOF}uids = [-1]", "security.tenants.0.uids.0"),
        (f'{NO_PROOF}token_sha256 = ["secret"]', "security.tenants.0.token_sha256.0"),
        (ONE + ONE, "'a' is there twice"),
        (f'{ONE}guaranteed_bytes = "2GiB"\nburst_bytes = "1GiB"', "burst_bytes must not be"),
        (f'{ONE}guaranteed_bytes = "2GiB"', "guaranteed_bytes come to"),
        (f'{ONE}guaranteed_bytes = "16385KiB"\n[arena]\nbytes = "16385KiB"', "in whole slabs"),
        (f'{ONE}burst_bytes = "{1 << 63}"', "security.tenants.0.burst_bytes"),
        (f'{ONE}table = "all"', "security.tenants.0.table"),
        (f'{NO_PROOF}certificate_names = ["x"]', "certificate_names need tls.client_ca"),
        ("[security]\nadmin_on_tcp = true", "admin_on_tcp needs"),
        ('[security]\nsocket_mode = "888"', "security.socket_mode"),
        ('[security]\nadmin_socket_mode = "rw"', "security.admin_socket_mode"),
        ("[security]\nallowed_uids = [-1]", "security.allowed_uids.0"),
        ("[events]\nanswers = true\n[http]\nport = -1", "events.answers needs http"),
        ('[security.tls]\ncertificate = "/x"', "certificate and key must be set together"),
        ('[security.tls]\nclient_ca = "/x"', "client_ca only with them"),
        ('[arena]\nbytes = "10Gx"', "arena.bytes"),
        ("[copy]\nthreads = -1", "copy.threads"),
        ("[tiers.disk]\nwrite_gb_per_day = inf", "tiers.disk.write_gb_per_day"),
        ('log_level = "loud"', "log_level"),
        ('[events]\ntopic = "kv@{pod}"', f"events.topic is 'kv@{{pod}}': {NAMES_OF_TOPICS}"),
        ('[events]\ntopic = "kv@{}"', "events.topic"),
        ('[events]\ntopic = "kv@{node[a]}"', "events.topic"),
        ('[events]\nendpoint = "udp://*:1"', "events.endpoint is 'udp://*:1': must begin with"),
        ('[events]\nidentity = "engine"\nendpoint = "tcp://*:1"', "leave endpoint empty"),
        ('[events]\nidentity = "pool"', "identity pool needs pool"),
        ('[events]\nidentity = "pool"\npool = "x"', "set tiers.valkey, tiers.mooncake or tiers.s3"),
        ('[events]\nreplay_endpoint = "tcp://*:1"', "replay_endpoint needs endpoint"),
        ('[events]\nendpoint = "tcp://*"', "events.endpoint is 'tcp://*': must be as tcp://*:5557"),
        ('[events]\nendpoint = "tcp://10.0.0.1:99999"', "with a port up to 65535"),
        ('[events]\nendpoint = "ipc://"', "or ipc://PATH"),
        (
            '[events]\nendpoint = "tcp://*:1"\nreplay_endpoint = "tcp://*:1"',
            "replay_endpoint must be another address than endpoint",
        ),
        ('[tracing]\nendpoint = "collector:4317"', "http:// or https://"),
        ('[tracing]\nendpoint = "http://far:1"\nheaders_file = "/x"', "insecure"),
        ('[tracing]\nendpoint = "env"\nheaders_file = "/x"', "OTLP_HEADERS"),
        ('[tracing]\nendpoint = "https://me:secret@far"', "headers_file"),
        ('[tracing]\nendpoint = "grpc://me:secret@far"', "tracing.endpoint: must be a URL"),
        ("[tracing]\nsample_ratio = 2", "less than or equal to 1"),
        (TCP, "tcp_address needs security.tls.certificate and key"),
        (TCP + TLS, "tcp_address lets everybody in"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ValueError) as caught:
        load_settings(tmp_path / "c.toml", [], "test")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "security",
    [
        f'{TLS}\nclient_ca = "/a"',
        f'{TLS}\n{NO_PROOF}token_sha256 = ["{"0" * 64}"]',
        "[security]\ntcp_insecure = true",
    ],
)
def test_tcp_opens_on_proof_or_on_purpose(tmp_path: Path, security: str) -> None:
    (tmp_path / "c.toml").write_text(TCP + security)
    assert load_settings(tmp_path / "c.toml", [], "test").tcp_address == "host:1"
