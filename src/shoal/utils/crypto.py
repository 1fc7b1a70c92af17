"""Keys that own records, under the import path that users know."""

from shoal.dht.crypto import Ed25519PrivateKey, Ed25519PublicKey, PrivateKey, PublicKey, RSAPrivateKey, RSAPublicKey

__all__ = ["Ed25519PrivateKey", "Ed25519PublicKey", "PrivateKey", "PublicKey", "RSAPrivateKey", "RSAPublicKey"]
