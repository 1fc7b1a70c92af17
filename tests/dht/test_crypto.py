"""Signed records: keys, owners, and what is refused."""

from __future__ import annotations

import base64
import dataclasses
import pickle
import subprocess
import sys
import time

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st

from shoal.dht.crypto import (
    PrivateKey,
    PublicKey,
    RSAPrivateKey,
    RSAPublicKey,
    RSASignatureValidator,
    SignatureValidator,
    peer_of,
    tag_of,
)
from shoal.dht.routing import DHTID
from shoal.dht.schema import SchemaValidator
from shoal.dht.validation import DHTRecord
from shoal.peers.identity import Identity

pytestmark = pytest.mark.oldest

KEY = DHTID.generate("key").to_bytes()


WEAK_POINTS = [
    "00" * 32,
    "01" + "00" * 31,
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "ec" + "ff" * 30 + "7f",
]


def ssh_text(public_key: bytes) -> bytes:
    """A raw Ed25519 key in the form in which owners are written."""
    name = b"ssh-ed25519"
    blob = len(name).to_bytes(4, "big") + name + len(public_key).to_bytes(4, "big") + public_key
    return name + b" " + base64.b64encode(blob)


@pytest.fixture(scope="module")
def alice() -> SignatureValidator:
    return SignatureValidator(PrivateKey())


@pytest.fixture(scope="module")
def mallory() -> SignatureValidator:
    return SignatureValidator(PrivateKey())


def signed(validator: SignatureValidator, owner: SignatureValidator, value: bytes = b"value") -> DHTRecord:
    """A record with the owner's tag, signed by ``validator``."""
    record = DHTRecord(KEY, b"subkey" + owner.local_public_key, value, 100.0)
    return dataclasses.replace(record, value=validator.sign_value(record))


def test_records_without_owner_pass_untouched(alice, mallory):
    record = DHTRecord(KEY, b"subkey", b"value", 100.0)
    assert alice.sign_value(record) == b"value"
    assert mallory.validate(record)
    assert mallory.strip_value(record) == b"value"


def test_signature_lookalikes_in_open_records_are_user_data(alice):
    fake = b"value[signature:" + b"A" * 86 + b"==]"
    assert alice.strip_value(DHTRecord(KEY, b"subkey", fake, 100.0)) == fake


def test_the_owner_can_sign_and_everybody_can_check(alice, mallory):
    record = signed(alice, alice)
    assert record.value.startswith(b"value[signature:")
    assert alice.validate(record)
    assert mallory.validate(record)
    assert mallory.strip_value(record) == b"value"


def test_others_do_not_sign_for_the_owner(alice, mallory):
    record = signed(mallory, alice)
    assert record.value == b"value"
    assert not alice.validate(record)
    assert not mallory.validate(record)


@pytest.mark.parametrize(
    "change",
    [
        {"key": DHTID.generate("other").to_bytes()},
        {"expiration_time": 101.0},
        {"expiration_time": 99.0},
        {"value": b"value"},
        {"value": b""},
    ],
    ids=str,
)
def test_a_captured_record_cannot_be_changed(alice, change):
    assert not alice.validate(dataclasses.replace(signed(alice, alice), **change))


def test_value_subkey_and_signature_belong_together(alice, mallory):
    record = signed(alice, alice)
    assert not alice.validate(dataclasses.replace(record, value=b"x" + record.value))
    assert not alice.validate(dataclasses.replace(record, value=record.value + b"x"))
    assert not alice.validate(dataclasses.replace(record, subkey=b"other" + alice.local_public_key))
    assert not alice.validate(dataclasses.replace(record, subkey=record.subkey + mallory.local_public_key))
    assert not alice.validate(dataclasses.replace(record, value=record.value + record.value[len(b"value") :]))


def test_a_record_has_one_owner(alice, mallory):
    twice = DHTRecord(KEY, alice.local_public_key * 2, b"value", 100.0)
    assert alice.validate(dataclasses.replace(twice, value=alice.sign_value(twice))), "the same one, said twice"
    two = DHTRecord(KEY, alice.local_public_key + mallory.local_public_key, b"value", 100.0)
    assert not alice.validate(dataclasses.replace(two, value=alice.sign_value(two)))


@pytest.mark.parametrize("tag", [b"[owner:nobody]", b"[owner:ssh-ed25519 AAAA]", b"[owner:\xff\x00]", b"[owner:]]"])
def test_nonsense_owners_cannot_be_satisfied(alice, tag):
    signature = alice.sign_value(DHTRecord(KEY, alice.local_public_key, b"value", 100.0))
    assert not alice.validate(DHTRecord(KEY, tag, signature, 100.0))


@pytest.mark.parametrize("point", WEAK_POINTS)
def test_keys_without_a_private_half_own_nothing(alice, point):
    """R = A, S = 0 fits such a key for at least one message in eight, without any secret."""
    text = ssh_text(bytes.fromhex(point))
    with pytest.raises(ValueError, match="no private half"):
        PublicKey.from_bytes(text)
    for number in range(32):
        forged = DHTRecord(KEY, b"%d[owner:" % number + text + b"]", b"", 100.0)
        signature = base64.b64encode(bytes.fromhex(point) + bytes(32))
        assert not alice.validate(dataclasses.replace(forged, value=b"x[signature:" + signature + b"]"))


@given(subkey=st.binary(max_size=60), value=st.binary(max_size=200))
def test_hostile_bytes_never_raise(alice, subkey, value):
    for prefix in (b"", b"[owner:", alice.local_public_key):
        record = DHTRecord(KEY, prefix + subkey + b"]", value + b"[signature:" + value + b"]", 1.0)
        is_open = b"[owner:" not in record.subkey
        assert alice.validate(record) or not is_open
        assert not (alice.validate(record) and alice.local_public_key in record.subkey)
        assert isinstance(alice.strip_value(record), bytes)


def test_checked_records_are_not_checked_again(alice, mallory, monkeypatch):
    record = signed(alice, alice, b"remember me")
    assert mallory.validate(record)
    monkeypatch.setattr(PublicKey, "verify", lambda *args: pytest.fail("verified again"))
    assert mallory.validate(record)
    assert alice.validate(record), "the signer knows its own signature"


def test_changes_to_an_owned_record_are_noticed(alice):
    record = signed(alice, alice, b"mine")
    later = dataclasses.replace(record, expiration_time=record.expiration_time + 1)
    other = dataclasses.replace(record, value=record.value.replace(b"mine", b"mime"))
    assert [alice.validate(each) for each in (record, later, other)] == [True, False, False]


def test_parser_reads_other_forms_of_a_key(alice):
    """A comment may follow; and what only begins like a key of the usual form is none."""
    text = PrivateKey().get_public_key().to_bytes()
    assert PublicKey.from_bytes(text + b" somebody@somewhere").to_bytes() == text
    for wrong in (b"ssh-ed25519 " + b"A" * 68, b"ssh-ed25519 " + b"!" * 68, text[:-1] + b"!", text[:-1], text[1:]):
        with pytest.raises(ValueError, match="OpenSSH"):
            PublicKey.from_bytes(wrong)


def test_peers_of_tags_are_cached_and_refusals_repeated():
    peer = Identity.generate().peer_id
    assert peer_of(tag_of(peer)) == peer
    assert peer_of(tag_of(peer)) is peer_of(tag_of(peer))
    for wrong in (b"[owner:]", tag_of(peer)[:-1], "text", None, [1]):
        for _ in range(2):
            with pytest.raises(ValueError, match="tag"):
                peer_of(wrong)


def test_keys_survive_as_bytes():
    private = PrivateKey()
    again = PrivateKey.from_bytes(private.to_bytes())
    signature = again.sign(b"data")
    public = PublicKey.from_bytes(private.get_public_key().to_bytes())
    assert public == private.get_public_key()
    assert len({public, private.get_public_key()}) == 1
    assert public.verify(b"data", signature)
    assert not public.verify(b"other", signature)
    assert not public.verify(b"data", b"not base64!")
    assert not PrivateKey().get_public_key().verify(b"data", signature)


def test_only_ed25519_keys_are_taken():
    foreign = rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()
    raw = foreign.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    for data in (raw, b"", b"ssh-ed25519", b"\xff" * 50):
        with pytest.raises(ValueError, match=r"OpenSSH|Ed25519"):
            PublicKey.from_bytes(data)


def test_one_key_for_the_whole_process():
    assert PrivateKey.process_wide() is PrivateKey.process_wide()
    assert SignatureValidator().local_public_key == SignatureValidator().local_public_key
    assert SignatureValidator(PrivateKey()).local_public_key != SignatureValidator().local_public_key


def test_validators_can_be_pickled(alice):
    restored = pickle.loads(pickle.dumps(alice))
    assert restored.local_public_key == alice.local_public_key
    assert alice.validate(signed(restored, alice))
    key = PrivateKey()
    assert pickle.loads(pickle.dumps(key.get_public_key())) == key.get_public_key()


def test_a_pickled_validator_signs_in_another_process(alice):
    program = "import pickle, sys; v, r = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(v.sign_value(r))"
    record = DHTRecord(KEY, alice.local_public_key, b"value", 100.0)
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps((alice, record)), stdout=subprocess.PIPE, check=True
    )
    assert alice.validate(dataclasses.replace(record, value=done.stdout))


def test_two_signature_validators_are_one(alice, mallory):
    assert alice.merge_with(mallory)
    for owner in (alice, mallory):
        assert alice.validate(signed(alice, owner)), "it signs with either key"
    assert signed(mallory, alice).value == b"value", "what was merged in stays as it is"
    assert not alice.merge_with(SchemaValidator.__new__(SchemaValidator))
    assert alice.priority == 10


def test_a_signature_has_one_form(alice):
    """The last character before ``==`` has bits that mean nothing."""
    record = signed(alice, alice)
    assert alice.validate(record)
    assert record.value.endswith((b"A==]", b"Q==]", b"g==]", b"w==]"))
    other = {b"A": b"B", b"Q": b"R", b"g": b"h", b"w": b"x"}[record.value[-4:-3]]
    assert not alice.validate(dataclasses.replace(record, value=record.value[:-4] + other + b"==]"))


@pytest.mark.parametrize("subkey", [b"[owner:" * 580, b"[owner:" * 580 + b"]", b"]" + b"[owner:" * 580])
def test_tags_without_end_cost_little(alice, subkey):
    """A request may hold hundreds of such records, and the loop does nothing else meanwhile."""
    began = time.thread_time()
    for number in range(256):
        alice.validate(DHTRecord(KEY, subkey, b"value", float(number)))
    assert time.thread_time() - began < 1


def test_the_familiar_names():
    assert (RSASignatureValidator, RSAPrivateKey, RSAPublicKey) == (SignatureValidator, PrivateKey, PublicKey)
