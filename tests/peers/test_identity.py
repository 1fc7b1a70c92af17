"""Keys: the file that keeps one, signatures, and certificates that carry the peer id."""

from __future__ import annotations

import datetime
import os
import random
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, rsa
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import P2PDaemonError
from shoal.p2p import Identity
from shoal.peers.identity import peer_id_of_certificate, verify_signature

pytestmark = pytest.mark.oldest

IDENTITY = Identity.generate()
on_posix = pytest.mark.skipif(os.name != "posix", reason="file modes are a POSIX thing")


def test_file_is_made_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "id"
    first = Identity.load_or_create(path)
    assert Identity.load_or_create(str(path)).peer_id == first.peer_id
    assert Identity.load_or_create(tmp_path / "other").peer_id != first.peer_id


@on_posix
def test_file_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Identity.load_or_create(tmp_path / "id")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "id").stat().st_mode) == 0o600


@on_posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o777])
def test_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "id"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(P2PDaemonError, match=f"chmod 600 {path}"):
        Identity.load_or_create(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        IDENTITY.to_bytes()[:-1],
        IDENTITY.to_bytes() + b"\n",
        b"\x08\x00" + IDENTITY.to_bytes()[2:],
        IDENTITY.to_bytes()[:36] + bytes(32),
        bytes(68),
    ],
    ids=["empty", "garbage", "cut", "longer", "other type", "public half of somebody else", "zeros"],
)
def test_damaged_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "id"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(P2PDaemonError, match=str(path)):
        Identity.load_or_create(path)
    assert path.read_bytes() == data, "a file that is no identity must not be overwritten"


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Identity.load_or_create(tmp_path / "nowhere" / "id")


def test_a_directory_is_no_identity(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(P2PDaemonError, match="cannot use identity file"):
        Identity.load_or_create(tmp_path)


def test_interrupted_writing_leaves_no_half_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        with pytest.raises(OSError, match="No space"):
            Identity.load_or_create(tmp_path / "id")
    assert list(tmp_path.iterdir()) == []
    Identity.load_or_create(tmp_path / "id")


def test_same_randomness_same_identity() -> None:
    assert Identity.generate(random.Random(1)).peer_id == Identity.generate(random.Random(1)).peer_id
    assert Identity.generate(random.Random(1)).peer_id != Identity.generate(random.Random(2)).peer_id


@given(st.binary(max_size=100), st.integers(0, 511))
def test_signatures(message: bytes, flipped_bit: int) -> None:
    signature = IDENTITY.sign(message)
    assert len(signature) == 64
    assert verify_signature(IDENTITY.public_key, signature, message)
    assert not verify_signature(IDENTITY.public_key, signature, message + b"x")
    assert not verify_signature(Identity.generate().public_key, signature, message)
    forged = bytearray(signature)
    forged[flipped_bit // 8] ^= 1 << flipped_bit % 8
    assert not verify_signature(IDENTITY.public_key, bytes(forged), message)


@pytest.mark.parametrize("sign_bit", [0, 0x80])
@pytest.mark.parametrize(
    "key",
    [
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    ],
    ids=lambda key: key[:6],
)
def test_keys_without_a_secret_prove_nothing(key: str, sign_bit: int) -> None:
    """For points of small order, a signature made from nothing fits every few messages."""
    public_key = bytearray.fromhex(key)
    public_key[31] |= sign_bit
    for number in range(100):
        for first_half in (bytes(public_key), bytes(32), b"\x01" + bytes(31)):
            assert not verify_signature(bytes(public_key), first_half + bytes(32), b"message %d" % number)


@given(st.binary(max_size=40), st.binary(max_size=80))
def test_hostile_signatures(public_key: bytes, signature: bytes) -> None:
    assert not verify_signature(public_key, signature, b"message")


def test_certificate_carries_the_peer_id() -> None:
    pem, _ = IDENTITY.certificate_pem()
    der = ssl.PEM_cert_to_DER_cert(pem.decode())
    assert peer_id_of_certificate(der) == IDENTITY.peer_id


@given(st.binary(max_size=400))
def test_hostile_certificates(data: bytes) -> None:
    assert peer_id_of_certificate(data) is None


DER = ssl.PEM_cert_to_DER_cert(IDENTITY.certificate_pem()[0].decode())


@given(st.integers(0, len(DER) - 1), st.integers(1, 255))
def test_damaged_certificates(position: int, change: int) -> None:
    """Any outcome but an exception will do: TLS itself checks that the other side has the key."""
    damaged = bytearray(DER)
    damaged[position] ^= change
    peer_id_of_certificate(bytes(damaged))


@pytest.mark.parametrize(
    "make_key",
    [
        lambda: rsa.generate_private_key(65537, 2048),
        lambda: ec.generate_private_key(ec.SECP256R1()),
        lambda: ed448.Ed448PrivateKey.generate(),
        lambda: dsa.generate_private_key(1024),
    ],
    ids=["RSA", "EC", "Ed448", "DSA"],
)
def test_certificates_of_other_keys(make_key) -> None:
    key = make_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, str(IDENTITY.peer_id))])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now)
    algorithm = None if isinstance(key, ed448.Ed448PrivateKey) else hashes.SHA256()
    certificate = builder.sign(key, algorithm)
    assert peer_id_of_certificate(certificate.public_bytes(serialization.Encoding.DER)) is None
