"""Secure sums under attack: what a client refuses, and what a changed message costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from secagg_world import (
    COMPLETE,
    SPARSE,
    STEPS,
    TINY,
    World,
    again,
    key_of,
    losing,
    one_line,
    session_of,
)

from fedtools.privacy.secagg import shares, signed, survivors
from fedtools.privacy.secagg.keys import (
    KEYS_BYTES,
    Secrets,
    pair_masks,
    private,
    read_keys,
    send_keys,
)
from fedtools.privacy.secagg.participant import Participant
from fedtools.privacy.secagg.plan import Options, plan
from fedtools.privacy.secagg.promises import Promises
from fedtools.privacy.secagg.session import Session
from fedtools.privacy.secagg.signed import HEADER_BYTES, Step

# What a client refuses


def test_a_share_of_one_kind_is_revealed_of_each():
    session = session_of()
    lost = session.names[session.graph.neighbours[0][0]]
    world = World(session, change=losing({lost: "masked"})).until("survivors")
    held = dict(world.clients["c0000"]._held)
    body = world.until("unmask").sent["unmask"]["c0000"][HEADER_BYTES + 32 : -64]
    assert len(body) == 33 * len(held)
    for place, number in enumerate(sorted(held)):
        shown, hidden = held[number].seed, held[number].masks
        if session.names[number] == lost:
            shown, hidden = hidden, shown
        assert body[33 * place :][:33] == shown
        assert hidden not in world.sent["unmask"]["c0000"]


def certificate(world: World, listed: survivors.Listed, signers: list[int]) -> bytes:
    """Make a certificate of any list, with the signatures of some clients."""
    session = world.session
    content = survivors.write_list(session, listed)
    digest = survivors.list_digest(content)
    made = {
        one: key_of(session.names[one]).sign(survivors.signing(session, one, digest))
        for one in signers
    }
    return survivors.write_certificate(content, made)


def test_another_list_or_attempt_is_refused_for_good():
    world = World(session_of()).until("survivors")
    listed = world.server._listed
    client = world.clients["c0000"]
    fewer = survivors.Listed(listed.dealers, listed.survivors - {7})
    said = "another list of survivors than was signed here"
    assert one_line(client.unmask, certificate(world, fewer, sorted(fewer.survivors))) == said
    # Bound by the signature, before anything is unmasked.
    key, kept = key_of("c0000"), world.promises["c0000"]
    attempt = "in round 3 another attempt than 2 was signed; finish that one"
    assert one_line(Participant, again(world.session), "c0000", key, kept) == attempt
    client.unmask(world.given["survivors"])
    assert one_line(Participant, again(world.session), "c0000", key, kept) == attempt
    assert "not due" in one_line(client.unmask, world.given["survivors"])
    assert client._held == {} and Participant(session_of(round=4), "c0000", key, kept)


def test_an_attempt_that_began_before_another_was_signed_is_refused():
    first = World(session_of())
    second = World(again(session_of()), promises=first.promises)
    second.until("masked")
    first.until("survivors")
    said = one_line(second.clients["c0000"].survivors, second.given["masked"])
    assert said == "in round 3 another attempt than 2 was signed; finish that one"
    assert (first.total() == first.expected()).all()


def test_two_lists_never_have_enough_signatures():
    # Half of the honest sign one list each, and the colluders both.
    for plan_ in (SPARSE, COMPLETE, plan(Options(), 100), plan(Options(), 11)):
        honest = plan_.clients - plan_.colluding
        assert (honest + 1) // 2 + plan_.colluding >= honest // 2 + plan_.colluding
        assert honest // 2 + plan_.colluding < plan_.quorum


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one, near: (one.dealers, one.survivors - {0}), "this client is missing"),
        (
            lambda one, near: (one.dealers, frozenset(range(13))),
            "13 survivors, and 14 are the least",
        ),
        (lambda one, near: (one.dealers - {near}, one.survivors - {near}), "has other neighbours"),
    ],
)
def test_lists_that_no_client_signs(change, words):
    session = session_of()
    near = session.graph.neighbours[0][-1]
    world = World(session).until("masked")
    dealers, left = change(world.server._listed, near)
    content = survivors.write_list(session, survivors.Listed(dealers, left))
    assert words in one_line(world.clients["c0000"].survivors, content)


def test_a_client_whose_neighbours_are_gone_signs_nothing():
    session = session_of(replace(SPARSE, lost=8, threshold=4))
    world = World(session).until("masked")
    near = set(session.graph.neighbours[0][:8])
    listed = survivors.Listed(frozenset(range(20)), frozenset(range(20)) - near)
    said = one_line(world.clients["c0000"].survivors, survivors.write_list(session, listed))
    assert said == ("round 3: of this client and its neighbours 3 are left, and 4 are the least")


def test_signatures_are_counted_once_and_of_survivors_alone():
    gone = session_of().names[19]
    world = World(session_of(), change=losing({gone: "masked"})).until("survivors")
    session, listed = world.session, world.server._listed
    least = session.plan.quorum
    client = world.clients["c0000"]
    good = certificate(world, listed, list(range(least - 1)))
    row = good[-68:]
    foreign = (18).to_bytes(4, "big") + row[4:]
    dropped = certificate(world, listed, [19])[-68:]
    for more in (b"", row, row * 3, foreign, dropped, (10**6).to_bytes(4, "big") + row[4:]):
        said = one_line(client.unmask, good + more)
        assert said == f"a list of survivors that {least - 1} have signed, and {least} must"
    assert "a certificate of" in one_line(client.unmask, good[:-1])
    assert client.unmask(certificate(world, listed, list(range(least))))


def test_steps_are_done_once_and_in_order():
    world = World(session_of()).until("shares")
    client = world.clients["c0000"]
    assert one_line(client.keys) == "step 'keys' is not due, but masked"
    assert one_line(client.shares, world.given["keys"]["c0000"]).startswith("step 'shares' is not")
    assert one_line(client.unmask, b"") == "step 'unmask' is not due, but masked"
    world.until("masked")
    other = world.values["c0001"]
    assert "not due" in one_line(client.masked, world.given["shares"]["c0000"], other)


def test_keys_of_others_are_refused():
    session = session_of()
    said = "not the key of c0000 in the roster of round 3"
    assert one_line(Participant, session, "c0000", key_of("c0001"), Promises()) == said
    said = "'x' is not in the roster of round 3"
    assert one_line(Participant, session, "x", key_of("c0001"), Promises()) == said
    world = World(session).until("keys")
    given = world.given["keys"]["c0000"]
    client, near = world.clients["c0000"], session.graph.neighbours[0]
    # A server puts its own key in place of a neighbour's.
    forged = send_keys(session, near[0], Secrets(), key_of("mallory"))
    name = session.names[near[0]]
    said = one_line(client.shares, forged + given[KEYS_BYTES:])
    assert said == f"message 'keys' of {name} is not signed with its key in the roster"
    far = next(one for one in range(1, 20) if one not in near)
    stranger = send_keys(session, far, Secrets(), key_of(session.names[far]))
    for wrong in (stranger, given + given[:KEYS_BYTES], given[KEYS_BYTES:] + given[:KEYS_BYTES]):
        assert one_line(client.shares, wrong) == "keys of others than this client's neighbours"
    said = one_line(client.shares, given[: 4 * KEYS_BYTES])
    assert said == "keys of 4 of 10 neighbours; 5 needed"
    old = session_of(attempt=2)
    replayed = send_keys(old, near[0], Secrets(), key_of(name))
    assert "of another experiment, round or attempt" in one_line(
        client.shares, replayed + given[KEYS_BYTES:]
    )
    assert client.shares(given)


def test_shares_for_others_are_not_read():
    world = World(session_of()).until("shares")
    session, given = world.session, world.given["shares"]
    client, near = world.clients["c0000"], session.graph.neighbours[0]
    rows = [given["c0000"][at : at + shares.ROW_BYTES] for at in range(0, len(given["c0000"]), 162)]
    values = world.values["c0000"]
    for wrong in (b"".join(rows[:4]), b"".join(reversed(rows)), b"".join(rows)[:-1]):
        one_line(client.masked, wrong, values)
    far = next(one for one in range(1, 20) if one not in near)
    strange = far.to_bytes(4, "big") + rows[0][4:]
    merged = b"".join(sorted([strange, *rows]))
    assert "others than this client's neighbours" in one_line(client.masked, merged, values)
    # What a dealer sent to another client, and a commitment that is not the dealer's.
    dealer = rows[0][:4]
    foreign = next(
        given[session.names[holder]][at : at + 162]
        for holder in session.graph.neighbours[near[0]]
        for at in range(0, len(given[session.names[holder]]), 162)
        if holder and given[session.names[holder]][at : at + 4] == dealer
    )
    swapped = rows[0][:4] + foreign[4:]
    turned = rows[1][:-1] + bytes([rows[1][-1] ^ 1])
    client.masked(b"".join([swapped, turned, *rows[2:]]), values)
    names = [session.names[one] for one in near[:2]]
    assert client.problems == [f"the shares of {name} for c0000 are damaged" for name in names]
    assert [client._held[one] for one in near[:2]] == [None, None]


def test_a_share_that_a_client_lacks_costs_nothing():
    session = session_of(COMPLETE)
    lost = session.names[-1]

    def damage(given: bytes) -> bytes:
        rows = [bytearray(given[at : at + 162]) for at in range(0, len(given), 162)]
        rows[-1][30] ^= 1
        return b"".join(rows)

    world = World(session, change=losing({lost: "masked"})).until("shares")
    world.given["shares"] = {
        name: damage(given) if name in session.names[:2] else given
        for name, given in world.given["shares"].items()
    }
    assert (world.total() == world.expected()).all()
    assert shares.NO_SHARE in world.sent["unmask"]["c0000"]
    assert world.clients["c0000"].problems == [f"the shares of {lost} for c0000 are damaged"]


# Tampering with clients' messages


def forgeries(session: Session, step: str, name: str) -> dict[str, object]:
    """Return ways to change a message, and what is said of it."""
    letter = Step[step.upper()].value
    number = session.numbers[name]
    other = again(session)

    def flipped(place: int):
        return lambda one: one[:place] + bytes([one[place] ^ 16]) + one[place + 1 :]

    def resealed(body_of, key=None, session=session, sender=number, kind=letter):
        def change(one: bytes) -> bytes:
            body = body_of(one[HEADER_BYTES:-64])
            return signed.seal(Step(kind), session, sender, body, key or key_of(name))

        return change

    same = lambda body: body  # noqa: E731
    return {
        "not signed": flipped(HEADER_BYTES + 3),
        "not  signed": lambda one: one[:-1] + bytes([one[-1] ^ 1]),
        "no such message": flipped(3),
        "of another experiment, round or attempt": flipped(20),
        "of another experiment, round or  attempt": resealed(same, session=other),
        "sent by another client": resealed(same, sender=(number + 1) % 5),
        "is not signed with its key": resealed(same, key=key_of("mallory")),
        "bytes instead of": lambda one: one + b"x",
        "bytes  instead of": lambda one: one[: len(one) // 2],
        "bytes   instead of": lambda one: b"",
        " bytes instead of ": resealed(lambda body: bytes(body) + b"x"),
        "no such  message": resealed(same, kind=b"U" if letter != b"U" else b"K"),
    }


@pytest.mark.parametrize("step", STEPS)
def test_a_changed_message_costs_its_sender_alone(step):
    session = session_of(TINY, size=9)
    for words, change in forgeries(session, step, "c0003").items():
        world = World(
            session,
            change=lambda now, name, message, change=change: (
                change(message) if (now, name) == (step, "c0003") else message
            ),
        )
        assert (world.total() == world.expected()).all()
        assert list(world.server.refused) == ["c0003"], words
        said = world.server.refused["c0003"]
        assert " ".join(words.split()) in said and "\n" not in said
        assert said.startswith(f"message '{step}' of c0003") and not world.failed


def test_swapped_senders_and_strangers():
    world = World(session_of(COMPLETE))
    sent = {name: client.keys() for name, client in world.clients.items()}
    sent["c0001"], sent["c0002"] = sent["c0002"], sent["c0001"]
    sent["mallory"] = sent["c0003"]
    given = world.server.keys(sent)
    assert set(given) == set(world.session.names) - {"c0001", "c0002"}
    assert world.server.refused == {
        "c0001": "message 'keys' of c0001: sent by another client",
        "c0002": "message 'keys' of c0002: sent by another client",
        "mallory": "'mallory' is not in the roster",
    }


def test_vectors_count_once_and_only_of_those_who_dealt_shares():
    session = session_of(COMPLETE)
    world = World(session, change=losing({"c0001": "shares"})).until("shares")
    sent = {
        name: client.masked(world.given["shares"][name], world.values[name])
        for name, client in world.clients.items()
    }
    late = sent["c0002"]
    pairs = [*sent.items(), ("c0002", late), ("c0001", late), ("c0004", late)]
    world.given["masked"] = world.server.masked(pairs)
    world.sent["masked"] = sent
    assert world.server.refused == {
        "c0001": "c0001 was lost in an earlier step",
        "c0002": "a second masked vector of c0002",
        "c0004": "a second masked vector of c0004",
    }
    assert (world.total() == world.expected()).all()


def test_a_wrong_share_or_seed_is_told_from_right_ones():
    session = session_of(COMPLETE)

    def change(step, name, message):
        if step == "masked" and name == "c0007":
            return None
        if step != "unmask" or name not in ("c0001", "c0002"):
            return message
        body = bytearray(message[HEADER_BYTES:-64])
        body[5 if name == "c0001" else 32 + 33 * 6 + 20] ^= 1
        return signed.seal(Step.UNMASK, session, session.numbers[name], bytes(body), key_of(name))

    world = World(session, change=change)
    assert (world.total() == world.expected()).all()
    assert world.server.refused == {
        "c0001": "message 'unmask' of c0001 has another seed than its keys",
        "c0002": "message 'unmask' of c0002 has a wrong share of c0007",
    }


@pytest.mark.parametrize(("kind", "step"), [("masks", "masked"), ("seed", "unmask")])
def test_a_dealer_of_something_else_is_named(kind, step):
    session = session_of(COMPLETE)
    world = World(session, change=losing({"c0003": step})).until("keys")
    liar = world.clients["c0003"]
    liar._kept = replace(liar._kept, **{kind: bytes(32)})
    said = one_line(world.total)
    assert said == (
        "round 3: c0003 has dealt shares of something else than its keys; go on without c0003"
    )


def test_shares_that_do_not_fit_commitments_are_not_held(monkeypatch):
    session = session_of(COMPLETE)
    world = World(session).until("keys")
    with monkeypatch.context() as patched:
        patched.setattr(shares, "committed", lambda *words: bytes(32))
        dealt = world.clients["c0007"].shares(world.given["keys"]["c0007"])
    world.change = lambda step, name, message: (
        dealt if (step, name) == ("shares", "c0007") else message
    )
    # The client has done the step.
    world.clients["c0007"]._due.insert(0, Step.SHARES)
    world.until("masked")
    assert world.clients["c0000"].problems == ["the shares of c0007 do not fit its commitments"]
    assert world.clients["c0000"]._held[7] is None


def test_neighbours_without_keys_have_no_shares():
    world = World(session_of()).until("keys")
    near = world.session.graph.neighbours[0]
    given = world.given["keys"]["c0000"]
    world.given["keys"]["c0000"] = given[KEYS_BYTES:]
    client = world.clients["c0000"]
    client.shares(given[KEYS_BYTES:])
    del world.clients["c0000"]
    world.until("shares")
    rows = [one.to_bytes(4, "big") + bytes(shares.ROW_BYTES - 4) for one in near]
    said = one_line(client.masked, b"".join(rows), world.values["c0000"])
    assert said == f"shares of {world.session.names[near[0]]}, which sent no keys"


def test_promises_are_kept_in_order():
    in_order(lambda kept=Promises(): kept)


def test_promises_outlive_the_process_that_made_them(tmp_path):
    """Each use is of a process of its own, as another one may have signed meanwhile."""
    path = tmp_path / "promises.tsv"
    in_order(lambda: Promises(path))
    session = session_of()
    for label, number, signed_there in (("exp", 3, True), ("exp", 4, False), ("new", 3, False)):
        assert Promises(path).signed(label, number) == signed_there
    Promises(path).check(session)
    assert "another attempt than 2 was signed" in one_line(Promises(path).check, again(session))
    # A digest of 32 zeros: of the attempt, and of the list.
    row = path.read_text().splitlines()[1].split("\t")
    assert row == ["exp", "3", session.digest.hex(), bytes(32).hex()]
    # One process, which has read the file before another signs.
    early, attempt = Promises(path), again(session_of(round=5))
    early.check(attempt)
    Promises(path).sign(session_of(round=5), bytes(32))
    assert "another attempt than 2 was signed" in one_line(early.sign, attempt, bytes(32))


def in_order(process):
    session = session_of()
    said = "in round 3 this list of survivors was not signed here"
    assert one_line(process().check_signed, session, bytes(32)) == said
    process().sign(session, bytes(32))
    process().sign(session, bytes(32))
    said = "in round 3 another list of survivors was signed"
    assert one_line(process().sign, session, b"x" * 32) == said
    assert "not signed here" in one_line(process().check_signed, session, b"x" * 32)
    process().check(session_of(label="other"))
    process().check_signed(session, bytes(32))
    assert "another attempt" in one_line(process().check_signed, again(session), bytes(32))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("6c\n", "6c", "the last line has no end"),
        ("\t3\t", "\t-3\t", "round is '-3', not a whole number"),
        ("\t6c6c6c", "\t6c6c6", "list is '6c"),
        ("\t6c6c6c", "\t6c6c6G", "list is '6c6c6G"),
        ("experiment\t", "", "the header is"),
        ("exp\t", "exp\t\t", "5 fields, the header has 4"),
    ],
)
def test_a_damaged_promise_is_no_missing_one(tmp_path, old, new, said):
    path = tmp_path / "promises.tsv"
    Promises(path).sign(session_of(), b"l" * 32)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    for ask in (Promises(path).check, lambda one: Promises(path).sign(one, b"l" * 32)):
        assert said in one_line(ask, session_of())
    assert path.read_text() == text.replace(old, new, 1)


@pytest.mark.parametrize("point", [bytes(32), (1).to_bytes(32, "little")])
def test_public_keys_that_protect_nothing(point):
    session = session_of()
    body = private(bytes(32)).public_key().public_bytes_raw() + point + bytes(32)
    message = signed.seal(Step.KEYS, session, 0, body, key_of("c0000"))
    said = "message 'keys' of c0000 has a key that protects nothing"
    world = World(session, change=lambda step, name, one: message if name == "c0000" else one)
    world.until("keys")
    assert world.server.refused == {"c0000": said}
    # A client finds it, too.
    keys = read_keys(session, 0, message)
    assert one_line(pair_masks, session, 1, Secrets().masks, {0: keys.masks}) == said
