"""An authority that issues tokens, and members of a swarm that have them."""

from __future__ import annotations

import asyncio

from shoal.base.clock import get_dht_time
from shoal.dht.authorization import AccessToken, TokenAuthorizerBase
from shoal.dht.crypto import PrivateKey, PublicKey


class Authority:
    """Issues tokens."""

    def __init__(self) -> None:
        self._key = PrivateKey()
        self.public_key = self._key.get_public_key()

    def token_for(self, public_key: PublicKey, name: str, lifetime: float) -> AccessToken:
        token = AccessToken(name, public_key.to_bytes(), get_dht_time() + lifetime)
        token.signature = self._key.sign(token.signed_bytes())
        return token


class Member(TokenAuthorizerBase):
    """Authorizes the peers that an authority knows."""

    def __init__(self, authority: Authority, name: str = "member", lifetime: float = 3600.0) -> None:
        super().__init__(PrivateKey())
        self._authority, self._name, self._lifetime = authority, name, lifetime
        self.tokens_given = 0
        self.fails = False

    async def get_token(self) -> AccessToken:
        await asyncio.sleep(0.01)
        if self.fails:
            raise ConnectionError("the authority is away")
        self.tokens_given += 1
        return self._authority.token_for(self.local_public_key, self._name, self._lifetime)

    def is_token_valid(self, access_token: AccessToken) -> bool:
        is_genuine = self._authority.public_key.verify(access_token.signed_bytes(), access_token.signature)
        return is_genuine and access_token.expiration_time > get_dht_time()

    def does_token_need_refreshing(self, access_token: AccessToken) -> bool:
        return access_token.expiration_time < get_dht_time() + self._lifetime / 2
